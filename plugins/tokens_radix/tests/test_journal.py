"""Learnt sequences survive a restart, and a damaged journal never does more harm than losing hits."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from radix_support import cuts, ends, journals, learnt, prompts, radix, tokens_of

from kvloom import BackendError
from kvloom_tokens_radix import journal as journal_module
from kvloom_tokens_radix import slots
from kvloom_tokens_radix.cutting import Rules
from kvloom_tokens_radix.records import MAGIC, Replay, record
from kvloom_tokens_radix.tree import Tree

HERE = str(Path(__file__).parent)


def test_a_restart_keeps_what_was_learnt(tmp_path: Path) -> None:
    asked = prompts(40)
    expected = learnt(tmp_path, asked)
    assert cuts(tmp_path, asked) == expected != cuts(tmp_path / "other", asked)
    more = prompts(40, seed=1)
    also = learnt(tmp_path, more)
    assert cuts(tmp_path, asked + more) == expected + also
    assert len(journals(tmp_path)) == 1


def test_only_asking_writes_nothing(tmp_path: Path) -> None:
    cuts(tmp_path, prompts(3))
    assert not list(tmp_path.iterdir())


@settings(deadline=None, max_examples=30)
@given(data=st.data(), memory=st.sampled_from([6_000, 1 << 20]))
def test_changes_done_again_make_the_same_tree(data: st.DataObject, memory: int) -> None:
    tree, again = Tree(Rules(8, 2), memory), Tree(Rules(8, 2), memory)
    replay = Replay(again)
    known: list[list[int]] = [[]]
    for _ in range(data.draw(st.integers(1, 25))):
        base = data.draw(st.sampled_from(known))
        known.append(base[: data.draw(st.integers(0, len(base)))] + data.draw(st.lists(st.integers(0, 3), max_size=30)))
        salt = data.draw(st.sampled_from(["", "a\ud800"]))
        changes = tree.learn(salt, torch.tensor(known[-1], dtype=torch.int32).numpy().tobytes())
        replay.apply(record(changes)[12:])
        assert {(one.id, one.edge, *one.ends, *one.starts) for one in tree.nodes()} == {
            (one.id, one.edge, *one.ends, *one.starts) for one in again.nodes()
        }
        assert again.nbytes == tree.nbytes


def test_the_file_is_written_anew_before_it_grows_without_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_SMALL_BYTES", 20_000)
    database = radix(path=tmp_path, memory="128KiB")
    for number in range(800):
        database.learn(tokens_of(300, number))
        if number % 50 == 0:
            time.sleep(0.01)  # so that the thread has its turns
    last = torch.cat([tokens_of(300, 799)[:150], tokens_of(100, 1)])
    database.close()
    assert journals(tmp_path)[0].stat().st_size < 600_000, "800 times 1.2 kB were learnt"
    assert 150 in cuts(tmp_path, [last], memory="128KiB")[0]
    tokens_in_order = cuts(tmp_path, [torch.cat([tokens_of(300, 0)[:150], tokens_of(100, 1)])], memory="128KiB")[0]
    assert 150 not in tokens_in_order, "forgotten"


def test_what_was_used_last_is_kept_when_there_is_less_memory(tmp_path: Path) -> None:
    database = radix(path=tmp_path)
    asked = [tokens_of(1000, seed) for seed in range(300)]
    for each in asked:
        database.learn(each)
    with database._lock:
        journal = next(iter(database._known.values()))[1]
        assert journal is not None
        journal._anew = True
    database.learn(tokens_of(500, 1000))
    database.close()
    branches = [torch.cat([each[:400], tokens_of(100, 1)]) for each in asked]
    found = [400 in each for each in cuts(tmp_path, branches, memory="256KiB")]
    assert found == sorted(found) and 10 < sum(found) < 100


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, len(MAGIC), len(MAGIC) + 5, 0.3, 0.7, -1])
def test_a_torn_tail_loses_only_itself(tmp_path: Path, keep: float, caplog: pytest.LogCaptureFixture) -> None:
    asked = prompts(30)
    expected = learnt(tmp_path, asked)
    file = journals(tmp_path)[0]
    size = file.stat().st_size
    os.truncate(file, int(keep * size) if 0 < keep < 1 else keep % size)
    found = cuts(tmp_path, asked)
    assert found[0] == expected[0] or keep in (0, 1, len(MAGIC), len(MAGIC) + 5)
    assert learnt(tmp_path, asked) is not None
    assert cuts(tmp_path, asked) == learnt(tmp_path, asked)
    assert not [line for line in caplog.records if line.levelno > logging.WARNING]


def test_flipped_bytes_are_a_warning_and_a_smaller_tree(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = prompts(30)
    learnt(tmp_path, asked)
    file = journals(tmp_path)[0]
    good = file.read_bytes()
    chance = Random(5)
    for place in [0, 7, len(MAGIC) + 2, *(chance.randrange(len(good)) for _ in range(60))]:
        bad = bytearray(good)
        bad[place] ^= 1 << chance.randrange(8)
        file.write_bytes(bad)
        caplog.clear()
        found = cuts(tmp_path, asked)
        plain = radix()
        for each, its_ends in zip(asked, found, strict=True):
            assert its_ends == sorted(set(its_ends)) and its_ends[-1] <= len(each)
            assert set(range(256, len(each) + 1, 256)) <= set(its_ends)
            plain.learn(each)
        said = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
        assert len(said) <= 1 and all(file.name in text for text in said)
    again = learnt(tmp_path, asked)
    assert cuts(tmp_path, asked) == again, "it is written anew, or goes on behind what is good"


@pytest.mark.parametrize("junk", [b"", b"x", b"\0" * 5000, os.urandom(5000), MAGIC + b"\xff" * 300])
def test_a_file_that_is_none_is_a_fresh_start(tmp_path: Path, junk: bytes) -> None:
    asked = prompts(10)
    expected = learnt(tmp_path, asked)
    file = journals(tmp_path)[0]
    file.write_bytes(junk)
    assert cuts(tmp_path, asked) == cuts(tmp_path / "other", asked)
    assert learnt(tmp_path, asked) == expected == cuts(tmp_path, asked)


def test_a_directory_that_goes_away_is_no_error_while_serving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kept"
    database = radix(path=path)
    database.segments(tokens_of(10))
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    for seed in range(5):
        database.learn(tokens_of(300, seed))
    database.close()
    assert "not saved" in caplog.text


def test_a_machine_without_threads_is_no_error_while_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    asked = prompts(10)
    for retry_seconds, warnings in ((60.0, 1), (0.0, len(asked))):
        monkeypatch.setattr(journal_module, "_RETRY_SECONDS", retry_seconds)
        database = radix(path=tmp_path)
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", no_more)
            for each in asked:
                database.learn(each)
        assert caplog.text.count("not saved") == warnings
        caplog.clear()
        database.learn(tokens_of(300, 77))
        expected = [ends(database.segments(each)) for each in asked]
        database.close()
    assert cuts(tmp_path, asked) == expected != cuts(tmp_path / "other", asked)


# -- processes ---------------------------------------------------------------------------------------------------------

_FORKING = multiprocessing.get_context("fork")


def _learns(path: Path, seed: int, told: Connection) -> None:
    database = radix(path=path)
    for each in itertools.count(seed):
        database.learn(tokens_of(300, each))
        if each % 20 == 0:
            told.send(each)


@contextlib.contextmanager
def child(path: Path, seed: int) -> Iterator[Connection]:
    """A process that learns until it is killed, and now and then says how far it is."""
    mine, told = _FORKING.Pipe(duplex=False)
    process = _FORKING.Process(target=_learns, args=(path, seed, told), daemon=True)
    process.start()
    try:
        yield mine
    finally:
        process.kill()
        process.join()


def await_files(path: Path, count: int) -> None:
    until = time.monotonic() + 60
    while len(journals(path)) < count and time.monotonic() < until:
        time.sleep(0.01)


def test_killed_in_the_middle_what_was_written_is_there(tmp_path: Path) -> None:
    for start in (0, 100_000):
        with child(tmp_path, start) as said:
            for _ in range(20):
                last = said.recv()
            await_files(tmp_path, 1)
        assert last > start
        branches = [torch.cat([tokens_of(300, seed)[:150], tokens_of(100, 1)]) for seed in range(start, start + 100)]
        found = [150 in each for each in cuts(tmp_path, branches)]
        assert found[0] and found == sorted(found, reverse=True)
    assert len(journals(tmp_path)) == 1, "the second has taken over the first one's file"


def test_two_processes_have_a_file_each(tmp_path: Path) -> None:
    database = radix(path=tmp_path)
    database.learn(tokens_of(300, 500))
    with child(tmp_path, 0) as said:
        for _ in range(5):
            said.recv()
        database.learn(tokens_of(300, 501))
        await_files(tmp_path, 2)  # a process says what it has learnt, and writes it in a while
    database.close()
    assert len(journals(tmp_path)) == 2
    branch = torch.cat([tokens_of(300, 501)[:150], tokens_of(100, 1)])
    theirs = torch.cat([tokens_of(300, 0)[:150], tokens_of(100, 1)])
    one, other = radix(path=tmp_path), radix(path=tmp_path)
    found = [[150 in ends(each.segments(tokens)) for tokens in (branch, theirs)] for each in (one, other)]
    one.close()
    other.close()
    assert sorted(found) == [[False, True], [True, False]], "each goes on where one of them ended"


@contextlib.contextmanager
def idle_child() -> Iterator[None]:
    """A forked process that does nothing until it is killed."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(told, b"x")
            signal.pause()
        finally:
            os._exit(1)
    try:
        os.read(ready, 1)
        yield
    finally:
        os.close(ready)
        os.close(told)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_slot_that_was_released_is_free_whoever_has_a_copy_of_its_lock(tmp_path: Path) -> None:
    slot, _ = slots.take(tmp_path, "a")
    assert slot is not None
    copy = os.dup(slot._fd)  # as a child has that was forked a moment ago
    slot.release()
    again, _ = slots.take(tmp_path, "a")
    assert again is not None and again.path == slot.path
    again.release()
    os.close(copy)


def test_a_lock_that_is_removed_at_this_moment_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot, _ = slots.take(tmp_path, "a")
    assert slot is not None
    flock = slots.fcntl.flock

    def release_first(fd: int, how: int) -> None:
        monkeypatch.undo()
        slot.release()
        flock(fd, how)

    monkeypatch.setattr(slots.fcntl, "flock", release_first)
    one, _ = slots.take(tmp_path, "a")
    other, _ = slots.take(tmp_path, "a")
    assert one is not None and other is not None and one.path != other.path
    one.release()
    other.release()
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learnt(tmp_path, prompts(3))
    gate, take = threading.Event(), slots.take

    def hanging(directory: Path, name: str) -> tuple[slots.Slot | None, Path | None]:
        gate.wait(60)
        return take(directory, name)

    monkeypatch.setattr(slots, "take", hanging)
    monkeypatch.setattr(journal_module, "_LOAD_SECONDS", 0.01)
    database = radix(path=tmp_path)
    whole = ends(database.segments(tokens_of(400)))
    database.learn(tokens_of(400))
    assert whole == ends(database.segments(tokens_of(400))) and "does not answer" in caplog.text
    database.close()
    monkeypatch.undo()
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "kvloom-radix-load":
            thread.join(60)
    assert cuts(tmp_path, prompts(3)) == cuts(tmp_path, prompts(3)), "its slot is free again"
    assert [path.name.split(".")[1] for path in journals(tmp_path)] == ["0"]


def test_a_call_that_is_late_takes_no_file_again(tmp_path: Path) -> None:
    database = radix(path=tmp_path)
    database.learn(tokens_of(100))
    database.close()
    before = sorted(tmp_path.iterdir()), threading.active_count(), len(os.listdir("/proc/self/fd"))
    for verb in (database.learn, database.segments):
        with pytest.raises(BackendError, match="closed"):
            verb(tokens_of(200))
    assert (sorted(tmp_path.iterdir()), threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_a_forked_child_neither_frees_a_slot_nor_keeps_it(tmp_path: Path) -> None:
    slot, _ = slots.take(tmp_path, "a")
    assert slot is not None
    with idle_child():
        other, _ = slots.take(tmp_path, "a")
        assert other is not None and other.path != slot.path, "the child has not unlocked it"
        other.release()
        os.close(slot._fd)  # as the end of its process would
        slot._fd = -1
        again, _ = slots.take(tmp_path, "a")
        assert again is not None and again.path == slot.path
        again.release()


def test_who_finds_no_file_of_its_own_begins_with_another_ones(tmp_path: Path) -> None:
    asked = prompts(10)
    expected = learnt(tmp_path, asked)
    one = radix(path=tmp_path)
    assert [ends(one.segments(each)) for each in asked] == expected
    two = radix(path=tmp_path)
    assert [ends(two.segments(each)) for each in asked] == expected
    two.learn(tokens_of(300, 77))
    two.close()
    one.close()
    assert len(journals(tmp_path)) == 2
