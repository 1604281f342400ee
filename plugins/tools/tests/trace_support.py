"""Support for the tests of `kvloom trace`: recordings, and replaying them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cli_support import CHUNK, SPEC, run

from kvloom import KVSpec
from kvloom_tools.replay import Trace

BIG = KVSpec(model="tiny", num_layers=2, num_kv_heads=8, head_size=128, dtype="float32")
"""A spec whose chunks of 256 tokens have 4 MiB: from there on the pool keeps chunks and blobs in
pieces of one length."""


def config(path: Path, *tiers: dict[str, Any], chunk: int = CHUNK, **more: Any) -> Path:
    path.write_text(json.dumps({"chunk_tokens": chunk, "tiers": list(tiers), **more}))
    return path


def mooncake(path: Path, *requests: tuple[int, list[int]], every_ms: int = 1000) -> Path:
    """A trace in Mooncake's form: input lengths and ids."""
    lines = [
        {"timestamp": at * every_ms, "input_length": length, "output_length": 1, "hash_ids": ids}
        for at, (length, ids) in enumerate(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def replay(trace: Path, *arguments: object, status: int = 0) -> Any:
    done = run("trace", "replay", trace, *arguments, "--json", status=status)
    return done.json if status == 0 else done.err


def hits(result: Any, index: int = 0) -> dict[str, int]:
    return {tier["tier"]: tier["hit_tokens"] for tier in result["runs"][index]["tiers"]}


def spec_file(folder: Path) -> Path:
    path = folder / "spec.json"
    path.write_text(SPEC.to_json())
    return path


def recorded(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(list(Trace(path).requests())) == len(lines), "each can be read"
    return sorted(lines, key=lambda line: float(line["timestamp"]))
