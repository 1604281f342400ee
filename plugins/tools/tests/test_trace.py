"""`kvloom trace record | replay`, on engines that really ran: what is written, what is made of it, what is refused."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from children_support import forked
from cli_support import CHUNK, SPEC, run

from kvloom import Engine, KVSpec
from kvloom_tools.replay import Trace
from kvloom_tools.verbs import trace as trace_verb

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


# -- the whole way -----------------------------------------------------------------------------------------------------


def test_a_recorded_engine_replayed_has_the_hits_that_it_counted(tmp_path: Path) -> None:
    path = config(
        tmp_path / "kv.yaml",
        {"type": "memory", "capacity": "160MiB"},
        {"type": "disk", "path": str(tmp_path / "kv"), "capacity": "240MiB", "deadline": "60s"},
        chunk=256,
        save_tails=False,  # pieces leave gaps in memory, which a replay does not know of
        observers=[{"type": "trace", "path": str(tmp_path / "trace.jsonl")}],
    )
    rng = random.Random(3)
    kv = torch.zeros(BIG.blob_shape(7 * 256), dtype=BIG.torch_dtype)
    counted: dict[str, int] = {}
    with Engine.open(path, BIG) as engine:
        for _ in range(220):
            which = min(int(rng.paretovariate(0.7)), 40)
            tokens = torch.randint(0, 999, (rng.randrange(300, 1600),), generator=torch.Generator().manual_seed(which))
            salt = "ab"[which % 2]
            for name, number in engine.lookup(tokens, salt=salt).by_tier.items():
                counted[name] = counted.get(name, 0) + number
            mask = torch.ones(len(tokens), dtype=torch.bool)
            engine.retrieve(tokens, mask, kv=kv, salt=salt)
            engine.store(tokens, mask, kv=kv, salt=salt)
            assert engine.flush(30)
        evicted = {key.tier: n.chunks for key, n in engine.counters().items() if key.name == "evicted"}
    (tmp_path / "spec.json").write_text(BIG.to_json())
    result = replay(tmp_path / "trace.jsonl", path, "--spec", tmp_path / "spec.json")
    assert hits(result) == counted == result["trace"]["recorded_tokens"]
    assert {tier["tier"]: sum(tier["evicted"].values()) for tier in result["runs"][0]["tiers"]} == evicted
    assert min(counted.values()) > 5000 and min(evicted.values()) > 20, "neither is idle"
    assert hits(result, -1)["everything"] > sum(counted.values()), "without limits there are more"


def test_a_recorded_engine_that_keeps_tails_replayed_has_the_hits_that_it_counted(tmp_path: Path) -> None:
    tier = {"type": "dict", "capacity": "600KiB", "deadline": "20s"}
    observers = [{"type": "trace", "path": str(tmp_path / "trace.jsonl")}]
    path = config(tmp_path / "kv.yaml", tier, chunk=256, observers=observers)
    rng = random.Random(1)
    kv = torch.zeros(SPEC.blob_shape(2000), dtype=SPEC.torch_dtype)
    counted = 0
    with Engine.open(path, SPEC) as engine:
        for _ in range(150):
            which = min(int(rng.paretovariate(0.7)), 12)
            length = rng.randrange(20, 2000)
            tokens = torch.randint(0, 999, (2000,), generator=torch.Generator().manual_seed(which))[:length]
            counted += engine.lookup(tokens).tokens
            engine.retrieve(tokens, kv=kv)
            engine.store(tokens, kv=kv)
            assert engine.flush(30)
        evicted = sum(total.chunks for key, total in engine.counters().items() if key.name == "evicted")
    result = replay(tmp_path / "trace.jsonl", path, "--spec", spec_file(tmp_path))
    assert result["trace"]["broken"] == 0 and hits(result)["dict"] == counted == result["runs"][0]["hit_tokens"]
    assert result["trace"]["recorded_tokens"] == {"dict": counted} and counted % 256
    assert result["runs"][0]["tiers"][0]["evicted"]["capacity"] == evicted > 20
    assert result["runs"][0]["whole"] > 5
    without = config(tmp_path / "without.yaml", tier, chunk=256, save_tails=False)
    assert hits(replay(tmp_path / "trace.jsonl", without, "--spec", tmp_path / "spec.json"))["dict"] % 256 == 0


def spec_file(folder: Path) -> Path:
    path = folder / "spec.json"
    path.write_text(SPEC.to_json())
    return path


def recorded(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(list(Trace(path).requests())) == len(lines), "each can be read"
    return sorted(lines, key=lambda line: float(line["timestamp"]))


def test_a_tail_and_what_is_taken_of_a_shorter_prompt_are_recorded_apart(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    observers = [{"type": "trace", "path": str(trace)}]
    tokens, kv = torch.arange(600), torch.zeros(SPEC.blob_shape(600), dtype=torch.bfloat16)
    with Engine.open({"chunk_tokens": 256, "tiers": ["memory"], "observers": observers}, SPEC) as engine:
        engine.store(tokens[:400], kv=kv)
        assert int(engine.retrieve(tokens, kv=kv).count_nonzero()) == 400
        engine.store(tokens[:100], torch.arange(100) >= 64, kv=kv)
        segments = engine.segments(tokens)
        engine.save(segments, kv=kv).result()
        engine.save(segments[1:], kv=kv).result()
    short, long, masked, save, later = recorded(trace)
    first, piece, last = short["hash_ids"][0], *(number for _, _, number in short["pieces"])
    assert short["pieces"] == [[256, 384, piece], [384, 400, last]] and short["input_length"] == 400
    assert long["hash_ids"][0] == first and len(long["hash_ids"]) == 2 and long["served"] == {"memory": 400}
    assert [one[:2] for one in long["pieces"]] == [[512, 576], [576, 592], [256, 384], [384, 400]]
    assert [number for _, _, number in long["pieces"][2:]] == [piece, last]
    assert (masked["hash_ids"], masked["first"], masked["first_piece"]) == ([], 0, 1)
    assert [one[:2] for one in masked["pieces"]] == [[0, 64], [64, 96]]
    assert (save["copied"], save["copied_pieces"]) == (1, 2) and save["hash_ids"] == long["hash_ids"]
    assert later["input_length"] == 592 - 256 and later["hash_ids"] == long["hash_ids"][1:]
    assert later["pieces"] == [[start - 256, end - 256, number] for start, end, number in long["pieces"][:2]]
    assert (later["copied"], later["copied_pieces"]) == (0, 0)


def test_segments_of_any_length_are_recorded_as_pieces(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    observers = [{"type": "trace", "path": str(trace)}]
    settings = {"chunk_tokens": 256, "tokens": "radix", "tiers": ["memory"], "observers": observers}
    tokens, kv = torch.arange(600), torch.zeros(SPEC.blob_shape(600), dtype=torch.bfloat16)
    fork = torch.cat([tokens[:100], tokens[:400] + 1000])
    with Engine.open(settings, SPEC) as engine:
        for prompt in (tokens, fork, fork):
            engine.store(prompt, kv=kv)
            engine.retrieve(prompt, kv=kv)
        assert engine.segments(fork)[0].end == 100
    lines = recorded(trace)
    assert len(lines[0]["hash_ids"]) == 2 and [one[:2] for one in lines[0]["pieces"]] == [[512, 600]]
    assert lines[-1]["hash_ids"] == [] and [one[:2] for one in lines[-1]["pieces"]] == [
        [0, 100], [100, 256], [256, 496],
    ]  # fmt: skip
    path = config(tmp_path / "kv.yaml", {"type": "memory"}, chunk=256, tokens="radix")
    result = replay(trace, path, "--spec", spec_file(tmp_path))
    assert hits(result) == result["trace"]["recorded_tokens"] and hits(result)["memory"] > 1500


SERVE = """
import sys, torch, kvloom
spec = kvloom.KVSpec("tiny", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16")
tokens = torch.arange(40)
with kvloom.Engine.open({"chunk_tokens": 4, "tiers": [{"type": "memory", "capacity": "1MiB"}]}, spec) as engine:
    kv = torch.zeros(spec.blob_shape(40), dtype=torch.bfloat16)
    engine.lookup(tokens)
    engine.store(tokens, kv=kv)
    for _ in range(int(sys.argv[1])):
        engine.retrieve(tokens, kv=kv)
    engine.flush()
    if len(sys.argv) > 2:
        import os, pathlib, signal, time
        trace = pathlib.Path(sys.argv[2])
        while not trace.exists() or trace.read_text().count("\\n") < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
sys.exit(7)
"""


def test_record_runs_a_command_and_gives_its_status(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    done = run("trace", "record", trace, "--", sys.executable, "-c", SERVE, "2", status=7)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert done.err.endswith(f"{trace}: 3 calls (2 retrieve, 1 store)\n")
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sorted(line["verb"] for line in lines) == ["retrieve", "retrieve", "store"]
    assert {line["input_length"] for line in lines} == {40} and {len(line["hash_ids"]) for line in lines} == {10}
    assert lines[0]["hash_ids"] == lines[1]["hash_ids"] and len(set(lines[0]["hash_ids"])) == 10
    assert lines[1]["served"] == {"memory": 40}
    assert trace.stat().st_mode & 0o777 == 0o600


def test_what_is_recorded_gives_nothing_away(tmp_path: Path) -> None:
    texts = []
    for name in ("one", "two"):
        block = {"type": "trace", "path": str(tmp_path / name)}
        with Engine.open({"chunk_tokens": CHUNK, "tiers": ["memory"], "observers": [block]}, SPEC) as engine:
            tokens, kv = torch.arange(100, 140), torch.zeros(SPEC.blob_shape(40), dtype=torch.bfloat16)
            engine.store(tokens, kv=kv, salt="team-red")
            digests = [segment.key.digest for segment in engine.segments(tokens, salt="team-red")]
            tag = engine.segments(tokens, salt="team-red")[0].key.namespace.partition("/")[2]
        texts.append((tmp_path / name).read_text())
    first, second = (json.loads(text)["hash_ids"] for text in texts)
    assert not set(first) & set(second), "each file has a secret of its own"
    assert "team-red" not in texts[0] and tag not in texts[0]
    for digest in digests:
        for order in ("little", "big"):
            known = {int.from_bytes(digest[at : at + n], order) for at in range(32) for n in (4, 6, 8, 32)}  # type: ignore[arg-type]
            assert not known & set(first)


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_whole_lines(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    run("trace", "record", trace, "--", sys.executable, "-c", SERVE, "3", trace, status=128 + signal.SIGKILL)
    source = Trace(trace)
    assert len(list(source.requests())) >= 3 and source.broken == 0


FULL = """
import resource, sys, torch, kvloom
spec = kvloom.KVSpec("tiny", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16")
observers = [{"type": "trace", "path": sys.argv[1]}]
config = {"chunk_tokens": 4, "tiers": [{"type": "memory", "capacity": "1MiB"}], "observers": observers}
with kvloom.Engine.open(config, spec) as engine:
    kv = torch.zeros(spec.blob_shape(40), dtype=torch.bfloat16)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # a write beyond it is cut short, and then fails
    for _ in range(9):
        engine.store(torch.arange(40), kv=kv)
        assert engine.retrieve(torch.arange(40), kv=kv).all()
    assert engine._events.flush(10)
    print([totals.count for key, totals in engine.counters().items() if key.reason == "trace"])
"""


def test_a_disk_that_is_full_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    done = forked(lambda: exec(FULL.replace("sys.argv[1]", repr(str(trace))), {}))
    assert (done.status, done.out) == (0, "[1]\n"), done.err
    source = Trace(trace)
    assert 0 < len(list(source.requests())) < 18 and source.broken == 0
    assert "recording ends after" in done.err


def test_recording_stops_at_the_length_that_was_asked_for(tmp_path: Path) -> None:
    block = {"type": "trace", "path": str(tmp_path / "trace"), "max_bytes": 1000}
    with Engine.open({"chunk_tokens": CHUNK, "tiers": ["memory"], "observers": [block]}, SPEC) as engine:
        for _ in range(20):
            engine.store(torch.arange(40), kv=torch.zeros(SPEC.blob_shape(40), dtype=torch.bfloat16))
    assert 500 < (tmp_path / "trace").stat().st_size <= 1000
    assert json.loads((tmp_path / "trace").read_text().splitlines()[-1])


def test_two_engines_write_two_files(tmp_path: Path) -> None:
    block = {"type": "trace", "path": str(tmp_path / "trace.jsonl")}
    source = {"chunk_tokens": CHUNK, "tiers": ["memory"], "observers": [block]}
    kv = torch.zeros(SPEC.blob_shape(40), dtype=torch.bfloat16)
    with Engine.open(source, SPEC) as one, Engine.open(source, SPEC) as two, Engine.open(source, SPEC):
        one.store(torch.arange(40), kv=kv)
        two.store(torch.arange(40), kv=kv)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.2.jsonl", "trace.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("there.jsonl", "--", "true"), "there.jsonl: exists already"),
        (("new.jsonl",), "COMMAND: what is to be run?"),
        (("no/new.jsonl", "--", "true"), "no directory that can be written to"),
        (("new.jsonl", "--", "no-such-command"), "COMMAND: 'no-such-command' cannot be run"),
        (("new.jsonl", "--max-bytes", "lots", "--", "true"), "--max-bytes: 'lots' should be a size"),
    ],
)
def test_record_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").touch()
    done = run("trace", "record", *arguments, status=2)
    assert problem in done.err and done.err.count("\n") == 1


def test_record_says_if_nothing_was_recorded(tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        done = run("trace", "record", tmp_path / "new.jsonl", "--", "true")
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
            signal.signal(number, handler)
    assert done.err == "kvloom: nothing was recorded: no engine of kvloom had a request in what was run\n"


# -- replaying ---------------------------------------------------------------------------------------------------------


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
        ((*KIB, "--chart", "chart.gif"), "--chart: 'chart.gif' should end in .png or .svg"),
        ((*KIB, "--chart", "nowhere/chart.png"), "--chart: there is no directory 'nowhere'; make it"),
    ],
)
def test_replay_refuses(tmp_path: Path, arguments: tuple[object, ...], problem: str) -> None:
    trace = mooncake(tmp_path / "trace.jsonl", (512, [1]))
    error = replay(trace, memory(tmp_path, 9), *arguments, status=2)
    assert problem in error and error.count("\n") == 1


def test_of_several_configurations_the_wrong_one_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("tiers: [{type: memory, capacity: much}]")
    error = replay(tmp_path / "trace.jsonl", memory(tmp_path, 9), wrong, *KIB, status=2)
    assert error.startswith(f"kvloom: {wrong}: tiers.0.capacity: should be a size")


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
    trace_verb._say_recorded(tmp_path / "a[1].jsonl")
    assert said == [f"{tmp_path / 'a[1].7.jsonl'}: 0 calls (none)"]
