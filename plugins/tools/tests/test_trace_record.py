"""`kvloom trace record`, on engines that really ran: what is written, and that a replay has the hits that they had."""

from __future__ import annotations

import json
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from children_support import forked
from cli_support import CHUNK, SPEC, run
from trace_support import BIG, config, hits, recorded, replay, spec_file
from typer.testing import CliRunner

from kvloom import ConfigError, Engine
from kvloom.cli.main import app
from kvloom_tools import shapes
from kvloom_tools.replay import Trace

# -- the whole way -----------------------------------------------------------------------------------------------------


def test_a_recorded_engine_replayed_has_the_hits_that_it_counted(tmp_path: Path) -> None:
    path = config(
        tmp_path / "kv.yaml",
        {"type": "memory", "capacity": "144MiB"},
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


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_record_says_if_nothing_was_recorded(tmp_path: Path) -> None:
    (tmp_path / "new.2.jsonl").write_text('{"verb": "load"}\n')  # of an earlier recording
    done = run("trace", "record", tmp_path / "new.jsonl", "--", "true")
    assert done.err == "kvloom: nothing was recorded: no engine of kvloom had a request in what was run\n"


@pytest.mark.usefixtures("handlers")
def test_whatever_lies_beside_a_recording_its_status_is_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloom_tools.verbs.trace._MOST_LINE_BYTES", 1 << 12)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside").write_text('{"verb": "load"}\n' * 3)
    made = "cp beside t.jsonl; truncate -s 1T t.2.jsonl; ln -s /dev/zero t.3.jsonl; cp beside t.x.jsonl"
    done = run("trace", "record", "t.jsonl", "--max-bytes", "1MiB", "--", "sh", "-c", f"{made}; exit 7", status=7)
    assert done.err == f"{tmp_path}/t.jsonl: 3 calls (3 load)\n{tmp_path}/t.2.jsonl: 0 calls (none)\n"
    monkeypatch.setattr("kvloom_tools.verbs.trace._verbs", mock.Mock(side_effect=PermissionError(13, "Not allowed")))
    done = run("trace", "record", "u.jsonl", "--", "sh", "-c", "cp beside u.jsonl; exit 7", status=7)
    assert done.err == f"{tmp_path}/u.jsonl: cannot be read: Not allowed\n"


def test_the_home_of_nobody_is_no_directory() -> None:
    said = CliRunner().invoke(app(), ["trace", "record", "~nobody-has-this-name/trace", "--", "true"])
    assert isinstance(said.exception, ConfigError) and "no directory that can be written to" in str(said.exception)
    with pytest.raises(ConfigError, match="~nobody-has-this-name"):
        shapes._file_of("~nobody-has-this-name/model", "--model")
