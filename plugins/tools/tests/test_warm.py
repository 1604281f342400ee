"""`kvloom warm` and `kvloom_tools.warm`: which tiers hold prompts, and bringing them up a tier."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_support import CHUNK, SPEC, Rack, blobs_in, fill, key_of, rack_installed, run, write_lines
from clock_support import Hang

import kvloom_tools
from kvloom import Engine
from kvloom_tools.warming import read_prompts

BLOB_BYTES = 8192
"""Space of one blob on the disk: a header and less than a page of KV."""


def warm(*arguments: object, status: int = 0) -> dict[str, Any]:
    return dict(run("warm", *arguments, "--json", status=status).json)


# -- saying it ---------------------------------------------------------------------------------------------------------


def test_it_says_what_each_tier_holds(config: Path, prompts: Path) -> None:
    found = warm(prompts, "--config", config)["lines"]
    assert found == [
        {"line": 1, "rank": 0, "tokens": 26, "hit": 24, "held": {"fast": CHUNK, "slow": 24}},
        {"line": 2, "rank": 0, "tokens": 9, "hit": 0, "held": {"fast": 0, "slow": 0}},
        {"line": 3, "rank": 0, "tokens": 24, "hit": 0, "held": {"fast": 0, "slow": 0}},
    ]
    fill(config, 6, salt="tenant")
    assert warm(prompts, "--config", config)["lines"][2]["hit"] == 24
    printed = run("warm", prompts, "--config", config).out
    assert "3 lines, 59 tokens, 48 of them hits" in printed


def test_pieces_are_counted_and_copied(config: Path, fast: Path, tmp_path: Path) -> None:
    config.write_text(config.read_text().replace(f"chunk_tokens: {CHUNK}", "chunk_tokens: 64"))
    tokens = list(range(200))
    with Engine.open(config, SPEC) as engine:
        engine.store(torch.tensor(tokens[:120]), kv=torch.zeros(SPEC.blob_shape(120), dtype=torch.bfloat16))
        assert engine.flush(30)
    files = blobs_in(fast)
    keys = {key_of(file, fast) for file in files}
    for file in files:
        file.unlink()
    file = write_lines(
        tmp_path / "prompts.jsonl",
        {"tokens": tokens},
        {"tokens": tokens[:120]},
        *sorted(keys),
        f"{'0' * 32}/-/0-{'0' * 64}",
    )
    found = [(line["tokens"], line["hit"], line["held"]) for line in warm(file, "--config", config)["lines"]]
    assert found[:2] == [(200, 112, {"fast": 0, "slow": 112}), (120, 112, {"fast": 0, "slow": 112})]
    assert sorted(tokens for tokens, _, _ in found[2:]) == [0, 16, 32, 64], "of a key, as its blob says"
    assert all((tokens, tokens) == (hit, held["slow"]) for tokens, hit, held in found[2:])
    file = write_lines(tmp_path / "prompts.jsonl", {"tokens": tokens})
    done = warm(file, "--config", config, "--into", "fast")
    assert done["copied"]["copied"] == 3 and done["lines"][0]["held"] == {"fast": 112, "slow": 112}
    with Engine.open(config, SPEC) as engine:
        assert [line.warm_tokens for line in kvloom_tools.warm(engine, file)] == [112]


def test_it_takes_what_why_takes(config: Path, tokens: list[int], tmp_path: Path) -> None:
    file = tmp_path / "prompt.json"
    for text in (json.dumps(tokens), json.dumps(tokens, indent=1)):
        file.write_text(text)
        assert run("why", config, "--tokens", file, "--json").json["leading_tokens"] == 24
        assert [line["hit"] for line in warm(file, "--config", config)["lines"]] == [24]
    write_lines(file, tokens, [7] * 9)
    assert [line["hit"] for line in warm(file, "--config", config)["lines"]] == [24, 0]


def test_looking_makes_no_directory(write_config: Callable[..., Path], fast: Path, tmp_path: Path) -> None:
    error = run("warm", write_lines(tmp_path / "p", [1] * 8), "--config", write_config(), status=2).err
    assert f"there is no directory '{fast}'" in error and not fast.exists()


def test_a_gap_ends_the_hit(config: Path, prompts: Path, slow: Path) -> None:
    blobs_in(slow)[2].unlink()
    assert warm(prompts, "--config", config)["lines"][0] == {
        "line": 1, "rank": 0, "tokens": 26, "hit": 2 * CHUNK, "held": {"fast": CHUNK, "slow": 5 * CHUNK},
    }  # fmt: skip


def test_keys_need_no_model(config: Path, tokens: list[int], slow: Path, tmp_path: Path) -> None:
    keys = [key_of(file, slow) for file in blobs_in(slow)]
    shutil.rmtree(slow / "spec")
    file = write_lines(tmp_path / "keys", *keys[:2], "", keys[0][:-1] + "0")
    found = warm(file, "--config", config)["lines"]
    assert [(one["line"], one["hit"], one["held"]["fast"]) for one in found] == [(1, 4, 0), (2, 4, 4), (4, 0, 0)]


def test_every_rank_is_looked_at(write_config: Callable[..., Path], fast: Path, tmp_path: Path) -> None:
    config, ranks = write_config(), [replace(SPEC, world_size=2, rank=rank) for rank in range(2)]
    prompt, _ = [fill(config, 2, spec) for spec in ranks]
    file = write_lines(tmp_path / "p", {"tokens": prompt})
    assert [(one["rank"], one["hit"]) for one in warm(file, "--config", config)["lines"]] == [(0, 8), (1, 8)]
    (tmp_path / "spec.json").write_text(ranks[1].to_json())
    found = warm(file, "--config", config, "--spec", tmp_path / "spec.json")["lines"]
    assert [(one["rank"], one["hit"]) for one in found] == [(0, 8), (1, 8)]


def test_which_model_must_be_clear(config: Path, prompts: Path, tmp_path: Path) -> None:
    fill(config, 1, replace(SPEC, model="other"))
    refused = run("warm", prompts, "--config", config, status=2).err
    assert refused == "kvloom: --spec: the tiers hold KV of several: other abc, tiny abc; give the spec of one\n"
    assert warm(prompts, "--config", config, "--model", "tiny")["lines"][0]["hit"] == 24
    (tmp_path / "spec.json").write_text(SPEC.to_json())
    assert warm(prompts, "--config", config, "--spec", tmp_path / "spec.json")["lines"][0]["hit"] == 24
    assert "no tier has a record of 'x'" in run("warm", prompts, "--config", config, "--model", "x", status=2).err


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "1: Expecting property name"),
        ('["a"]', "1: tokens: expected a list of token ids"),
        ("[1, 2", "1: Expecting"),
        ('{"tokens": ["a"]}', "1: tokens: expected a list of token ids"),
        ('{"tokens": null}', "1: tokens: expected a list of token ids"),
        ('{"tokens": [true]}', "1: tokens: expected a list of token ids"),
        ('{"tokens": [1], "text": "a"}', '1: expected {"tokens": [...]} or {"text": "..."}'),
        ('{"token": [1]}', '1: expected {"tokens": [...]} or {"text": "..."}'),
        ('{"tokens": [1], "salt": 3}', "1: salt: expected text, got 3"),
        ('{"text": "a"}', "1: text needs a tokenizer"),
        ("not/a/key", "1: not a chunk key: 'not/a/key'; a prompt is JSON, such as {\"text\""),
        ("[" * 100_000, "1: JSON is nested too deeply"),
        ('{"tokens": ' + "[" * 100_000, "1: JSON is nested too deeply"),
        (None, " cannot be read: No such file or directory"),
    ],
)
def test_files_that_are_no_prompts(config: Path, tmp_path: Path, line: str | None, problem: str) -> None:
    file = tmp_path / "p"
    if line is not None:
        file.write_text(line)
    refused = run("warm", file, "--config", config, status=2).err
    assert refused.startswith(f"kvloom: {file}:{problem}") and refused.count("\n") == 1


def test_no_more_is_read_than_a_file_of_prompts_has(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloom_tools.warming.MOST_BYTES", 100)
    refused = run("warm", "/dev/zero", "--config", config, status=2).err
    assert refused == "kvloom: /dev/zero: cannot be read: it has more than 100 bytes\n"


def test_a_line_ends_where_json_ends_it(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"
    file = tmp_path / "p"
    file.write_bytes((json.dumps({"text": text}, ensure_ascii=False) + "\r\n[1]\r\n").encode())
    first, second = read_prompts(file, lambda given: [int(given == text)])
    assert first.tokens is not None and first.tokens.tolist() == [1] and second.line == 2


def test_a_text_file_is_one_prompt(
    config: Path, tokens: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("[what is not JSON")
    tokenizer = SimpleNamespace(from_pretrained=lambda name, **_: lambda content: {"input_ids": tokens})
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=tokenizer))
    (row,) = run("warm", "--text", text, "--tokenizer", "its", "--config", config, "--json").json["lines"]
    assert row["tokens"] == row["hit"] == len(tokens)
    for wrong in ([], [text, "--text", text]):
        assert "FILE: give a file of prompts, or" in run("warm", *wrong, "--config", config, status=2).err
    assert "--tokenizer: by which" in run("warm", "--text", text, "--config", config, status=2).err


def test_text_needs_a_tokenizer_that_is_here(config: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p", {"text": "hello"})
    refused = run("warm", file, "--config", config, "--tokenizer", tmp_path / "nothing", status=2).err
    assert refused.startswith("kvloom: tokenizer: cannot load ")


# -- copying -----------------------------------------------------------------------------------------------------------


def test_into_a_faster_tier(config: Path, prompts: Path, fast: Path, slow: Path) -> None:
    found = warm(prompts, "--config", config, "--into", "fast")
    times = [file.stat().st_atime_ns for index, file in enumerate(blobs_in(fast)) if index != 1]
    assert found["copied"] == {"copied": 5, "bytes": sum(file.stat().st_size for file in blobs_in(slow)[1:])}
    assert found["lines"][0]["held"] == {"fast": 24, "slow": 24}
    assert {file.name: file.read_bytes() for file in blobs_in(fast)} == {
        file.name: file.read_bytes() for file in blobs_in(slow)
    }
    assert times == sorted(times, reverse=True), "tails are evicted before heads"
    assert warm(prompts, "--config", config, "--into", "fast")["copied"] == {"bytes": 0}
    assert run("scrub", config).status == 0


def test_an_engine_serves_what_was_copied(config: Path, prompts: Path, tokens: list[int], slow: Path) -> None:
    warm(prompts, "--config", config, "--into", "fast")
    shutil.rmtree(slow)
    expected = torch.randn(SPEC.blob_shape(24), generator=torch.Generator().manual_seed(0)).to(SPEC.torch_dtype)
    kv = torch.zeros_like(expected)
    with Engine.open(config, SPEC) as engine:
        assert engine.retrieve(torch.tensor(tokens), kv=kv).all()
    assert torch.equal(kv, expected)


def test_what_is_corrupt_is_not_copied(config: Path, prompts: Path, fast: Path, slow: Path) -> None:
    bad = blobs_in(slow)[3]
    data = bytearray(bad.read_bytes())
    data[-1] ^= 1
    bad.write_bytes(data)
    found = warm(prompts, "--config", config, "--into", "fast", status=1)
    assert (found["copied"]["copied"], found["copied"]["corrupt"]) == (4, 1)
    (problem,) = found["problems"]
    assert problem["key"] == key_of(bad, slow) and problem["reason"] == "in slow: byte 4096: payload checksum, buffer 0"
    assert bad.name not in [file.name for file in blobs_in(fast)]
    assert bad.exists(), "that is for scrub to judge"
    assert found["lines"][0]["held"]["fast"] == 20


def test_what_the_tier_cannot_decode_is_not_copied(
    write_config: Callable[..., Path], tokens: list[int], prompts: Path, fast: Path, slow: Path
) -> None:
    other = write_config(of_slow="serializer: safetensors", name="other")
    shutil.rmtree(slow)
    fill(other, 6)
    for file in blobs_in(fast):
        file.unlink()
    found = warm(prompts, "--config", other, "--into", "fast")
    assert found["copied"] == {"unreadable": 6, "bytes": 0}
    assert found["problems"][0]["reason"] == "tier fast does not read 'safetensors'"
    assert blobs_in(fast) == []


def test_a_capacity_is_kept(write_config: Callable[..., Path], prompts: Path, fast: Path) -> None:
    config = write_config(of_fast=f"capacity: {4 * BLOB_BYTES}")
    found = warm(prompts, "--config", config, "--into", "fast", "--threads", "3")
    assert found["copied"] == {"copied": 3, "no room": 2, "bytes": found["copied"]["bytes"]}
    assert found["problems"][0]["reason"] == "tier fast is at its capacity"
    assert sum(file.stat().st_blocks * 512 for file in blobs_in(fast)) <= 4 * BLOB_BYTES
    assert warm(prompts, "--config", config)["lines"][0]["held"]["fast"] == 16


@pytest.mark.parametrize(
    ("into", "of_fast", "problem"),
    [
        (
            "memory",
            "",
            "--into: tier 'memory' is in the memory of the process that serves; call kvloom_tools.warm(",
        ),
        ("faster", "", "--into: no stored tier is called 'faster'; there are: fast, slow"),
        ("slow", "", "--into: no tier is slower than 'slow'"),
        ("fast", "write: never", "--into: tiers.1 has `write: never`"),
    ],
)
def test_tiers_that_cannot_be_copied_into(
    write_config: Callable[..., Path], prompts: Path, into: str, of_fast: str, problem: str
) -> None:
    config = write_config(of_fast=of_fast)
    assert run("warm", prompts, "--config", config, "--into", into, status=2).err.startswith(f"kvloom: {problem}")


@pytest.fixture
def racks(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "racks.yaml"
    path.write_text(
        f"chunk_tokens: {CHUNK}\n"
        "tiers: [{type: rack, deadline: 20s}, {type: rack, name: deep, label: two, deadline: 20s}]\n"
    )
    with rack_installed(tmp_path):
        fill(path, 12)
        shallow = Rack.racks["one"]
        for key in [key for key in shallow if "/-/" in key]:
            del shallow[key]
        yield path


def test_a_store_that_fails_now_and_then(racks: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p", {"tokens": list(range(12 * CHUNK))})

    def broken(verb: str, key: str) -> None:
        if verb == "get" and "/3-" in key:
            raise OSError("a bad sector")

    def full(verb: str, key: str) -> None:
        if verb == "put" and "/5-" in key:
            raise OSError("No space left on device")

    Rack.before |= {"two": broken, "one": full}
    found = warm(file, "--config", racks, "--into", "rack", status=1)
    assert (found["copied"]["copied"], found["copied"]["failed"]) == (10, 2)
    assert {one["reason"] for one in found["problems"]} == {
        "OSError: a bad sector", "OSError: No space left on device",
    }  # fmt: skip
    assert found["lines"][0]["hit"] == 12 * CHUNK, "the slow tier still has all"


def test_a_tier_that_fails_is_left_out(
    write_config: Callable[..., Path], prompts: Path, slow: Path, fast: Path
) -> None:
    config = write_config()
    shutil.rmtree(slow)
    found = warm(prompts, "--config", config, status=1)
    assert [*found["left_out"]] == ["slow"] and found["lines"][0]["held"] == {"fast": CHUNK}
    slow.write_text("")
    assert "cannot write to" in run("warm", prompts, "--config", config, "--into", "fast", status=2).err
    shutil.rmtree(fast)
    fast.write_text("")
    assert "cannot write to" in run("warm", prompts, "--config", config, "--into", "fast", status=2).err


def test_a_tier_that_fails_later_is_left_out_too(racks: Path, tmp_path: Path) -> None:
    def refused(verb: str, key: str) -> None:
        if verb == "contains" and not key.startswith("spec/"):
            raise OSError("Connection refused")

    file = write_lines(tmp_path / "p", {"tokens": list(range(12 * CHUNK))})
    for label, failing, held in (("one", "rack", {"deep": 12 * CHUNK}), ("two", "deep", {"rack": 0})):
        Rack.before.clear()
        Rack.before[label] = refused
        found = warm(file, "--config", racks, status=1)
        assert [*found["left_out"]] == [failing] and found["lines"][0]["held"] == held
    Rack.before |= {"one": refused, "two": lambda verb, key: None}
    assert "Connection refused" in run("warm", file, "--config", racks, "--into", "rack", status=1).err


@pytest.mark.parametrize(("label", "verb"), [("two", "get"), ("one", "put"), ("two", "contains")])
def test_a_store_that_hangs_does_not_hang_the_command(
    racks: Path, tmp_path: Path, hang: Hang, label: str, verb: str
) -> None:
    file = write_lines(tmp_path / "p", {"tokens": list(range(12 * CHUNK))})
    Rack.before[label] = lambda at, key: hang(at, key) if at == verb else None
    done = run("warm", file, "--config", racks, "--into", "rack", "--threads", "2", status=1)
    assert "deadline" in done.err
