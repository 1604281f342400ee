"""`kvloom why` where a tier fails, or cannot be seen: what the others say, and that it is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import CHUNK, SPEC, Rack, ask, fill, rack_installed, run


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "rack.yaml"
    path.write_text(f"chunk_tokens: {CHUNK}\ntiers: [{{type: memory}}, {{type: rack, deadline: 3s}}]\n")
    with rack_installed(tmp_path):
        yield path


def test_a_store_that_fails_is_one_line_and_status_1(rack: Path) -> None:
    tokens = fill(rack, 1)
    assert [chunk["verdict"] for chunk in ask(rack, tokens)["chunks"]] == ["hit"]

    def fail(verb: str, key: str) -> None:
        if verb == "get":
            raise OSError("Connection refused")

    Rack.before["one"] = fail
    prompt, spec = rack.with_name("tokens.json"), rack.with_name("spec.json")
    done = run("why", rack, "--tokens", prompt, "--spec", spec, status=1)
    assert done.err.startswith("kvloom: tier rack: ") and done.err.count("\n") == 1


@pytest.mark.parametrize("verb", ["open", "contains"])
def test_a_tier_that_fails_does_not_keep_the_others_from_answering(rack: Path, tmp_path: Path, verb: str) -> None:
    path = tmp_path / "two.yaml"
    near = {"type": "disk", "path": str(tmp_path / "near")}
    path.write_text(json.dumps({"chunk_tokens": CHUNK, "tiers": [{"type": "rack", "deadline": "3s"}, near]}))
    tokens = fill(path, 2)
    Rack.before["one"] = lambda at, key: refuse() if at == verb else None
    answer = ask(path, [*tokens, *range(100, 104)])
    assert [(chunk["verdict"], chunk["tiers"]) for chunk in answer["chunks"]] == [
        ("hit", ["disk"]), ("hit", ["disk"]), ("not there", [])
    ]  # fmt: skip
    assert answer["chunks"][2]["why"].endswith("rack: no answer") and "Connection refused" in answer["left_out"]["rack"]
    prompt, spec = tmp_path / "tokens.json", tmp_path / "spec.json"
    assert run("why", path, "--tokens", prompt, "--spec", spec).err.startswith("kvloom: rack is left out: ")


def test_a_tier_that_fails_half_way_does_not_either(rack: Path, tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    near = {"type": "disk", "path": str(tmp_path / "near")}
    path.write_text(json.dumps({"chunk_tokens": CHUNK, "tiers": [{"type": "rack", "deadline": "3s"}, near]}))
    tokens = fill(path, 2)
    Rack.before["one"] = lambda at, key: refuse() if at == "get" else None
    answer = ask(path, tokens)
    assert [chunk["tiers"] for chunk in answer["chunks"]] == [["disk"]] * 2 and [*answer["left_out"]] == ["rack"]


@pytest.mark.parametrize("first", [True, False])
def test_nor_does_one_that_cannot_be_listed(rack: Path, tmp_path: Path, first: bool) -> None:
    path, near = tmp_path / "two.yaml", {"type": "disk", "path": str(tmp_path / "near")}
    tiers = [{"type": "rack", "deadline": "3s"}, near]
    path.write_text(json.dumps({"chunk_tokens": CHUNK, "tiers": tiers if first else tiers[::-1]}))
    tokens = fill(path, 2)
    Rack.before["one"] = lambda at, key: refuse() if at == "scan" else None
    prompt, spec = tmp_path / "tokens.json", tmp_path / "spec.json"
    spec.write_text(SPEC.to_json())
    for given in ((), ("--spec", spec)):
        for asked, there in ((tokens, True), (list(range(100, 108)), False)):
            prompt.write_text(json.dumps(asked))
            answer = run("why", path, "--tokens", prompt, *given, "--json").json
            assert [("disk" in chunk["tiers"]) for chunk in answer["chunks"]] == [there] * 2
            assert [*answer["left_out"]] == ["rack"] or (given and there)
    known = run("why", path, "--fingerprint", answer["fingerprint"][:8])
    assert "rack is left out" in known.err


def refuse() -> None:
    raise OSError("Connection refused")


def test_memory_cannot_be_seen_and_it_says_so(rack: Path) -> None:
    fill(rack, 1)
    ask(rack, [0, 1, 2, 3])
    prompt, spec = rack.with_name("tokens.json"), rack.with_name("spec.json")
    assert "own memory is not seen" in run("why", rack, "--tokens", prompt, "--spec", spec).out
