"""A disk tier in a memory file system (/dev/shm), which processes share, beside a memory tier of one's own.

KV is [2, 32 layers, 256 tokens a chunk, 1024] bf16: 33.6 MB a chunk, 16 chunks an operation; and 512 chunks of 64 KiB.
Tiers take turns. The first retrieve of a process maps and verifies every chunk; later ones copy it once.

    python bench/shared_memory.py [--dir /dev/shm]
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from table import SPEC, Rows, kv_cache, median_seconds, tokens_of

from kvloom import Engine, KVSpec

ROUNDS = 9


def measure(rows: Rows, folder: Path, spec: KVSpec, chunk: int, chunks: int) -> None:
    tokens, kv = tokens_of(chunk * chunks, seed=1), kv_cache(chunk * chunks, spec)
    out = torch.zeros_like(kv)
    nbytes = kv.nbytes
    common: dict[str, Any] = {"chunk_tokens": chunk, "connector": "plain"}
    shared = common | {"tiers": [{"type": "disk", "path": str(folder), "capacity": "4GiB"}]}
    with Engine.open(common | {"tiers": [{"type": "memory", "capacity": "2GiB"}]}, spec) as own:
        own.store(tokens, kv=kv)
        stored: list[float] = []
        with Engine.open(shared, spec) as writer:
            for _ in range(ROUNDS):
                writer.remove(tokens)
                stored.append(median_seconds(lambda: (writer.store(tokens, kv=kv), writer.flush()), 1))
        taken: dict[str, list[float]] = {"first": [], "again": [], "own": [], "copy": []}
        for _ in range(ROUNDS):
            with Engine.open(shared, spec) as other:
                for name, engine in (("first", other), ("again", other), ("own", own)):
                    taken[name].append(median_seconds(lambda engine=engine: engine.retrieve(tokens, kv=out), 1))
                    assert torch.equal(out.view(torch.int16), kv.view(torch.int16))
            taken["copy"].append(median_seconds(lambda: out.copy_(kv), 1))
    label = f"{chunks} chunks of {nbytes // chunks >> 10:,} KiB (GB/s)"
    gigabytes = nbytes / 1e9
    rows.spread(f"retrieve again, {label}", taken["again"], gigabytes, taken["own"], "memory tier")
    rows.spread(f"retrieve again, {label}", taken["again"], gigabytes, taken["copy"], "one copy_")
    rows.spread(f"a process's first retrieve, {label}", taken["first"], gigabytes, taken["own"], "memory tier")
    rows.spread(f"store until written, {label}", stored, gigabytes, taken["copy"], "one copy_")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    folder = parser.parse_args().dir
    rows = Rows("shared_memory")
    small = replace(SPEC, num_layers=2, num_kv_heads=1, head_size=128)
    for spec, chunk, chunks in ((SPEC, 256, 16), (small, 64, 512)):
        with tempfile.TemporaryDirectory(dir=folder) as path:
            measure(rows, Path(path), spec, chunk, chunks)
    rows.finish()


if __name__ == "__main__":
    main()
