"""`kvloom trace replay`: what is made of a recording, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import SPEC, run
from trace_support import config, hits, mooncake, replay

from kvloom import Engine
from kvloom_tools.configuration import load
from kvloom_tools.replay import sizes
from kvloom_tools.replay import trace as trace_module
from kvloom_tools.replay.stack import Sums
from kvloom_tools.verbs import trace as trace_verb


def memory(tmp_path: Path, chunks: int, *, chunk: int = 512, **more: Any) -> Path:
    """A memory tier for so many chunks of 1 KiB a token."""
    return config(tmp_path / "kv.yaml", {"type": "memory", "capacity": chunks * chunk * 1024, **more}, chunk=chunk)


KIB = ("--bytes-per-token", 1024)


def test_mooncake_traces_are_read_as_they_are(tmp_path: Path) -> None:
    # 6955 tokens are 13 whole blocks of 512; the 14th is not full, and is not kept.
    trace = mooncake(tmp_path / "trace.jsonl", (6955, [*range(14)]), (6955, [*range(14)]), (1024, [0, 99]))
    result = replay(trace, memory(tmp_path, 100), *KIB)
    assert hits(result) == {"memory": (13 + 1) * 512}
    assert (result["trace"]["requests"], result["trace"]["tokens"]) == (3, 2 * 6955 + 1024)
    assert result["runs"][0]["whole"] == 1 and result["runs"][0]["partly"] == 1
    packed = tmp_path / "trace.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert hits(replay(packed, tmp_path / "kv.yaml", *KIB)) == hits(result)


def test_chunks_may_be_longer_or_shorter_than_blocks(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "trace.jsonl", (2560, [1, 2, 3, 4, 5]), (2560, [1, 2, 3, 9, 10]))
    longer = replay(trace, memory(tmp_path, 99, chunk=1024), *KIB)
    assert hits(longer) == {"memory": 1024}, "of two chunks of 1024 tokens, the second differs"
    shorter = replay(trace, memory(tmp_path, 99, chunk=256), *KIB)
    assert hits(shorter) == {"memory": 3 * 512}
    error = replay(trace, memory(tmp_path, 99, chunk=300), *KIB, status=2)
    assert "no block of the trace goes with chunks of 300 tokens" in error


def test_of_what_is_saved_only_that_counts_which_the_engine_computed(tmp_path: Path) -> None:
    """An engine that has a prefix cache of its own saves what it found there, too, and asked nobody for it."""
    shape = {"timestamp": 0, "input_length": 2048, "hash_ids": [1, 2, 3, 4], "chunk_tokens": 512, "verb": "save"}
    saves = [{**shape, "copied": 4}, {**shape, "copied": 0}, {**shape, "copied": 1}, shape]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({**save, "timestamp": at}) + "\n" for at, save in enumerate(saves)))
    result = replay(trace, memory(tmp_path, 99), *KIB)
    assert hits(result) == {"memory": 512 + 2048} and result["runs"][0]["whole"] == 2
    assert result["trace"]["requests"] == 3 and result["runs"][0]["hit_rate"] == (512 + 2048) / (2048 + 512 + 2048)
    longer = replay(trace, memory(tmp_path, 99, chunk=1024), *KIB)
    assert hits(longer) == {"memory": 1024 + 2048}, "a chunk of which anything was computed was asked for"
    shorter = replay(trace, memory(tmp_path, 99, chunk=256), *KIB)
    assert hits(shorter) == {"memory": 512 + 2048}


def test_the_pieces_of_a_line_are_asked_for_and_taken_as_an_engine_would(tmp_path: Path) -> None:
    shape = {"input_length": 700, "chunk_tokens": 512, "salt": 0}
    tail, other = [[512, 640, 7], [640, 672, 8]], [[512, 528, 9]]
    halves = [[512, 576, 60], [576, 640, 61]]
    lines = [
        {**shape, "verb": "store", "hash_ids": [1], "pieces": tail},
        {**shape, "verb": "retrieve", "hash_ids": [1], "pieces": tail},
        {**shape, "verb": "retrieve", "hash_ids": [1], "pieces": tail, "first": 1, "first_piece": 1},
        {**shape, "verb": "retrieve", "hash_ids": [1, 2], "input_length": 1024, "pieces": [*tail, *other]},
        {**shape, "verb": "save", "hash_ids": [1], "pieces": tail, "copied": 0, "copied_pieces": 1},
        {**shape, "verb": "save", "hash_ids": [1], "pieces": tail, "copied": 0, "copied_pieces": 0},
        {**shape, "verb": "retrieve", "hash_ids": [], "pieces": [[0, 512, 1]], "input_length": 512},
        {**shape, "verb": "store", "hash_ids": [1], "pieces": halves},
        {**shape, "verb": "retrieve", "hash_ids": [1], "pieces": [[512, 640, 50], tail[1], *halves]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": at, **line}) + "\n" for at, line in enumerate(lines)))
    result = replay(trace, memory(tmp_path, 99), *KIB)
    run, tier = result["runs"][0], result["runs"][0]["tiers"][0]
    assert run["hit_tokens"] == tier["hit_tokens"] == 672 + 32 + 672 + 32 + 512 + 672
    assert result["trace"]["tokens"] == 700 + (700 - 640) + 1024 + (700 - 640) + 512 + 700
    assert (run["requests"], run["whole"], run["partly"]) == (6, 4, 2)
    assert tier["read_bytes"] == 1024 * tier["hit_tokens"] and tier["written_bytes"] == 1024 * (672 + 128)
    assert tier["held_bytes"] == 1024 * (672 + 128) and run["chunk_hit_rate"] == 4 / 5
    without = replay(trace, memory(tmp_path, 99, chunk=256), *KIB)
    assert hits(without) == {"memory": 3 * 512}, "pieces of other chunks"


def test_more_capacity_never_has_fewer_hits_and_the_curve_is_drawn(tmp_path: Path) -> None:
    rng = random.Random(1)
    requests = []
    for _ in range(400):
        which = min(int(rng.paretovariate(0.5)), 60)
        count = rng.randrange(1, 8)
        requests.append((count * 512, [which * 10 + n for n in range(count)]))
    trace = mooncake(tmp_path / "trace.jsonl", *requests)
    chart = tmp_path / "chart.svg"
    sizes = ",".join(f"{512 * n}KiB" for n in (8, 16, 64, 512))
    result = replay(trace, memory(tmp_path, 8), *KIB, "--capacity", f"memory={sizes}", "--chart", chart)
    *rates, most = [one["hit_rate"] for one in result["runs"]]
    assert rates == sorted(rates) and rates[0] < rates[-1] == most
    assert [one["capacities"]["memory"] for one in result["runs"][:-1]] == [512 * 1024 * n for n in (8, 16, 64, 512)]
    assert "capacity of memory" in chart.read_text()
    printed = run("trace", "replay", trace, tmp_path / "kv.yaml", *KIB, "--chart", tmp_path / "chart.png").out
    again = replay(trace, tmp_path / "kv.yaml", *KIB, "--chart", chart, status=2)
    assert "chart.svg exists already" in again and "capacity of memory" in chart.read_text()
    replay(trace, tmp_path / "kv.yaml", *KIB, "--chart", chart, "--force")
    assert "capacity of memory" not in chart.read_text()
    assert "without limits" in printed and (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_time_to_live_passes_in_the_time_of_the_trace(tmp_path: Path) -> None:
    path = memory(tmp_path, 99, ttl="90s")
    soon = mooncake(tmp_path / "soon.jsonl", (512, [1]), (512, [1]), every_ms=60_000)
    late = mooncake(tmp_path / "late.jsonl", (512, [1]), (512, [1]), every_ms=120_000)
    assert (hits(replay(soon, path, *KIB)), hits(replay(late, path, *KIB))) == ({"memory": 512}, {"memory": 0})


def test_lines_that_are_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "trace.jsonl", (512, [1]), (1024, [1, 2]), (1024, [1, 2]))
    trace.write_text("".join(reversed(trace.read_text().splitlines(keepends=True))))
    assert hits(replay(trace, memory(tmp_path, 9), *KIB)) == {"memory": 512 + 1024}


BROKEN = {
    "{": "not JSON",
    "[1]": "should be an object, not list",
    '{"timestamp": "x", "input_length": 512, "hash_ids": [1]}': "timestamp",
    '{"timestamp": NaN, "input_length": 512, "hash_ids": [1]}': "timestamp",
    '{"timestamp": true, "input_length": 512, "hash_ids": [1]}': "timestamp",
    '{"timestamp": 1, "input_length": -1, "hash_ids": []}': "input_length",
    '{"timestamp": 1, "input_length": 512, "hash_ids": [1.5]}': "hash_ids",
    '{"timestamp": 1, "input_length": 512, "hash_ids": [true]}': "hash_ids",
    '{"timestamp": 1, "input_length": 512, "hash_ids": [-1]}': "hash_ids",
    '{"timestamp": 1, "input_length": 512, "hash_ids": {}}': "hash_ids",
    '{"timestamp": 1, "input_length": 512, "hash_ids": [1, 2]}': "2 blocks of 512 are more than 512 tokens",
    '{"timestamp": 1, "input_length": 1024, "hash_ids": [1]}': "1 blocks of 512 are fewer than 1024 tokens",
    f'{{"timestamp": 1, "input_length": {10**40}, "hash_ids": []}}': "input_length: should be a number of tokens",
    '{"timestamp": 1, "input_length": 9, "hash_ids": [1], "verb": "fly"}': "verb",
    '{"timestamp": 1, "input_length": 9, "hash_ids": [1], "chunk_tokens": 0}': "chunk_tokens",
    '{"timestamp": 1, "input_length": 9, "hash_ids": [1], "served": {"memory": -5}}': "served",
    '{"timestamp": 1, "input_length": 9, "hash_ids": [1], "verb": "fly", "salt": 0}': "verb",
    '{"timestamp": 1, "input_length": 9, "hash_ids": [1], "first": 2, "salt": 0}': "first",
    '{"timestamp": 1, "input_length": 9, "hash_ids": [1], "chunk_tokens": 0, "salt": 0}': "chunk_tokens",
    '{"timestamp": 1, "input_length": 9, "hash_ids": [1], "verb": "save", "copied": "1"}': "copied",
    '{"timestamp": 1, "input_length": 9, "hash_ids": [1], "verb": "save", "copied": -1}': "copied",
    '{"timestamp": 1, "input_length": 600, "hash_ids": [1], "pieces": 3}': "pieces",
    '{"timestamp": 1, "input_length": 600, "hash_ids": [1], "pieces": [[512, 576]]}': "pieces",
    '{"timestamp": 1, "input_length": 600, "hash_ids": [1], "pieces": [[512, 576, true]]}': "pieces",
    '{"timestamp": 1, "input_length": 600, "hash_ids": [1], "pieces": [[512, 601, 2]]}': "is no part of a block",
    '{"timestamp": 1, "input_length": 600, "hash_ids": [1], "pieces": [[576, 576, 2]]}': "is no part of a block",
    '{"timestamp": 1, "input_length": 600, "hash_ids": [1], "pieces": [[0, 513, 2]]}': "is no part of a block",
    '{"timestamp": 1, "input_length": 600, "hash_ids": [1], "pieces": [[0, 16, -2]]}': "is no part of a block",
    '{"timestamp": 1, "input_length": 600, "hash_ids": [1], "pieces": [[512, 528, 2], [528, 544, 2]]}': "twice",
    '{"timestamp": 1, "input_length": 1100, "hash_ids": [1], "pieces": [[512, 1024, 1]]}': "twice",
    '{"timestamp": 1, "input_length": 1024, "hash_ids": [1, 1]}': "hash_ids: a block is there twice",
    '{"timestamp": 1, "input_length": 9, "hash_ids": [], "pieces": [], "first_piece": 1}': "first_piece",
    '{"timestamp": 1, "input_length": 9, "hash_ids": [], "pieces": [], "copied_pieces": -1}': "copied_pieces",
    "[" * 100_000: "nested too deeply",
    "\udcff": "not",
}


@pytest.mark.parametrize("line", BROKEN)
def test_broken_lines_are_counted_and_passed_over(tmp_path: Path, line: str) -> None:
    trace = mooncake(tmp_path / "trace.jsonl", (512, [1]), (512, [1]))
    first, second = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(first + line.encode(errors="surrogateescape") + b"\n" + second)
    result = replay(trace, memory(tmp_path, 9), *KIB)
    assert hits(result) == {"memory": 512}
    assert (result["trace"]["lines"], result["trace"]["broken"]) == (3, 1)
    assert result["trace"]["first_broken"][0]["line"] == 2 and BROKEN[line] in result["trace"]["first_broken"][0]["why"]
    printed = run("trace", "replay", trace, tmp_path / "kv.yaml", *KIB)
    assert "1 of 3 lines are no requests, and were passed over:\n  line 2: " in printed.err
    trace.write_bytes(line.encode(errors="surrogateescape") + b"\n")
    assert "none of 1 lines is a request" in replay(trace, tmp_path / "kv.yaml", *KIB, status=1)


def test_a_file_that_is_cut_short_counts_up_to_there(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "trace.jsonl", *[(512, [n]) for n in random.Random(0).sample(range(10**9), 2000)])
    packed = tmp_path / "trace.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes())[:-2000])
    result = replay(packed, memory(tmp_path, 9), *KIB)
    assert result["trace"]["broken"] >= 1 and 500 < result["trace"]["requests"] < 2000


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "--spec: the size of a token's KV is not known"),
        ((*KIB, "--capacity", "disk=1GiB"), "--capacity: "),
        ((*KIB, "--capacity", "memory=much"), "--capacity: 'much' should be a size"),
        ((*KIB, "--capacity", "memory=1KiB"), "tiers.0.capacity: 1024 bytes is less than one chunk takes"),
        ((*KIB, "--capacity", "8GiB"), "--capacity: '8GiB' should be like memory=8GiB,16GiB"),
        ((*KIB, "--ratio", "memory=0"), "--ratio: '0' should be a number"),
        ((*KIB, "--salt", "a=b"), "--salt: 'b' should be the number of a salt"),
        ((*KIB, "--salt", f"a={5000 * '9'}"), "should be the number of a salt"),
        ((*KIB, "--chart", "chart.gif"), "--chart: 'chart.gif' should end in .png or .svg"),
        ((*KIB, "--chart", "nowhere/chart.png"), "--chart: there is no directory 'nowhere'; make it"),
        ((*KIB, "--chart", "folder.png", "--force"), "--chart: folder.png is a directory; name a file"),
        ((*KIB, "--chart", "/proc/chart.png"), "--chart: /proc/chart.png cannot be written (No such file"),
    ],
)
def test_replay_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    trace = mooncake(tmp_path / "trace.jsonl", (512, [1]))
    error = replay(trace, memory(tmp_path, 9), *arguments, status=2)
    assert problem in error and error.count("\n") == 1


def test_of_several_configurations_the_wrong_one_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("tiers: [{type: memory, capacity: much}]")
    error = replay(tmp_path / "trace.jsonl", memory(tmp_path, 9), wrong, *KIB, status=2)
    assert error.startswith(f"kvloom: {wrong}: tiers.0.capacity: should be a size")


def test_a_line_of_more_chunks_than_can_be_kept_is_broken(tmp_path: Path) -> None:
    def line(blocks: int, tokens: int) -> str:
        ids = [*range(blocks)]
        made = {"timestamp": 1, "input_length": blocks * tokens, "hash_ids": ids, "chunk_tokens": tokens, "salt": 0}
        return json.dumps(made) + "\n"

    trace = tmp_path / "trace.jsonl"
    trace.write_text(line(256, 1024) + line(257, 1024) + line(1, 1026))
    small = config(tmp_path / "small.yaml", {"type": "memory"}, chunk=1)
    big = config(tmp_path / "big.yaml", {"type": "memory"}, chunk=2)
    about = replay(trace, big, small, *KIB)["trace"]
    assert (about["requests"], about["broken"]) == (1, 2)
    assert [one["why"] for one in about["first_broken"]] == [
        "hash_ids: 263168 chunks of 1 tokens; of 257 blocks at most 262144",
        "hash_ids: 1026 chunks of 1 tokens; of 1 blocks at most 1024",
    ]
    assert replay(trace, big, *KIB)["trace"]["requests"] == 3


def test_replay_of_no_file_is_one_line(tmp_path: Path) -> None:
    error = replay(tmp_path / "none.jsonl", memory(tmp_path, 9), *KIB, status=2)
    assert error == f"kvloom: {tmp_path}/none.jsonl: cannot be read: No such file or directory\n"


def test_the_variable_of_a_recording_is_no_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOM_TRACE", str(tmp_path / "${odd}.jsonl"))
    path = config(tmp_path / "kv.yaml", {"type": "memory"}, observers=["log"])
    with Engine.open(path, SPEC) as engine:
        assert [block.type for block in engine.config.observers] == ["log", "trace"]
        engine.store(torch.arange(8), kv=torch.zeros(SPEC.blob_shape(8), dtype=torch.bfloat16))
    assert (tmp_path / "${odd}.jsonl").is_file()
    assert os.environ["KVLOOM_TRACE"]


def test_what_has_no_end_is_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (Path("/dev/urandom"), tmp_path, tmp_path / "pipe"):
        error = replay(place, memory(tmp_path, 9), *KIB, status=2)
        assert error == f"kvloom: {place}: is no regular file; name one that has a trace\n"
    monkeypatch.setattr("kvloom_tools.replay.trace._MOST_LINE_BYTES", 1 << 12)
    trace = mooncake(tmp_path / "trace.jsonl", (512, [1]))
    length = trace.stat().st_size
    os.truncate(trace, 1 << 40)
    error = replay(trace, memory(tmp_path, 9), *KIB, status=2)
    assert error == f"kvloom: {trace}: line 2 has more than 4096 bytes; name a file with a trace\n"
    os.truncate(trace, length + 4096)
    assert replay(trace, memory(tmp_path, 9), *KIB)["trace"]["broken"] == 1


def test_what_is_packed_tighter_than_any_trace_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom_tools.replay.trace._MOST_LINE_BYTES", 1 << 12)
    trace = mooncake(tmp_path / "trace.jsonl", (512, [1]))
    packed = tmp_path / "trace.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes() + b"\n" * (2 << 20)))
    result = replay(packed, memory(tmp_path, 9), *KIB)
    assert result["trace"]["broken"] == 1 and "packed as tightly" in result["trace"]["first_broken"][0]["why"]


def test_brackets_in_the_name_of_a_recording_are_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a[1].7.jsonl").touch()
    said: list[str] = []
    monkeypatch.setattr(trace_verb.output, "say", lambda text, **_: said.append(text))
    trace_verb._say_recorded(tmp_path / "a[1].jsonl", (), 1000)
    assert said == [f"{tmp_path / 'a[1].7.jsonl'}: 0 calls (none)"]


def test_a_trace_is_not_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = mooncake(tmp_path / "trace.jsonl", *[(2560, [*range(at, at + 5)]) for at in range(100)])
    monkeypatch.setattr(trace_module, "_AHEAD_BLOCKS", 50)
    source = trace_module.Trace(trace)
    seen = []
    for line in source.requests():
        seen.append(line)
        assert source.lines - len(seen) < 20, "lines of 100 blocks wait at most"
    assert len(seen) == 100 and sorted(seen, key=lambda line: line.seconds) == seen


def test_a_line_cannot_make_more_of_itself(tmp_path: Path) -> None:
    shape = {"timestamp": 0, "input_length": 300, "hash_ids": [1], "chunk_tokens": 1 << 40, "verb": ""}
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(shape))
    assert "chunk_tokens: should be a number of tokens, at most" in replay(trace, memory(tmp_path, 9), *KIB, status=1)
    sums = Sums()
    for number in range(1000):
        sums.note_recorded({f"tier {number}": 1, "memory": 1})
    assert len(sums.recorded_tokens) == 65 and sums.recorded_tokens["memory"] == 1000
    assert sums.recorded_tokens.total() == 2000


def test_the_noise_of_one_length_is_kept_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []
    sample = sizes._sample

    def watched(*given: Any) -> Any:
        chunk = sample(*given)
        made.append(weakref.ref(chunk.tensor))
        return chunk

    monkeypatch.setattr(sizes, "_sample", watched)
    path = config(tmp_path / "kv.yaml", {"type": "memory", "capacity": "1GiB"}, {"type": "disk", "path": str(tmp_path)})
    plans = sizes.plan_tiers(load(path)[1], chunk_tokens=512, spec=SPEC)
    for tokens in range(16, 512, 16):
        assert all(plan.piece(tokens).stored for plan in plans)
    assert len(made) == 32 and sum(one() is not None for one in made) == 1
