"""The write queue: what it takes on it gives back once, whatever comes of the write, and says so once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from core_support import eventually

from kvloom import BackendError, ChunkKey
from kvloom.runtime import Batch, SystemRuntime, Workers
from kvloom.tiers.request_context import HURRIED_SHARE
from kvloom.tiers.stored.write_queue import Write, WriteQueue, WriteTold

A, B, C, D = (ChunkKey("f/-", number, bytes([number]) * 32) for number in range(4))


class Clock(SystemRuntime):
    """Moved by hand."""

    time = 100.0

    def now(self) -> float:  # type: ignore[override]
        return self.time


class Chunk:
    """The part of a leased chunk that the queue sees."""

    def __init__(self, nbytes: int = 10) -> None:
        self.chunk = SimpleNamespace(nbytes=nbytes)
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


class Desk:
    """A queue for 30 bytes with one thread, which works once the gate is open."""

    def __init__(self, batch_bytes: int = 0) -> None:
        self.clock = Clock()
        self.lost: list[str] = []
        self.accepted: list[ChunkKey] = []
        self.gate = threading.Event()
        self.workers = Workers(self.clock, name="test-write", threads=1)
        self.fails = False
        self.batches: list[list[ChunkKey]] = []
        self.queue = WriteQueue(
            self.workers, self.clock, deadline=10.0, max_bytes=30, batch_bytes=batch_bytes,
            store=self.store, on_accepted=lambda write: self.accepted.append(write.key),
            on_lost=lambda write, reason: self.lost.append(reason), on_late=lambda: None,
        )  # fmt: skip

    def store(self, writes: Sequence[Write], told: WriteTold) -> None:
        self.batches.append([write.key for write in writes])
        self.gate.wait(20)
        if self.fails:
            raise OSError("no route")
        for number in range(len(writes)):
            told(number, "")

    def submit(self, key: ChunkKey, chunk: Any, *, patience: float = 0.0, inquiry: Any = None) -> Any:
        return self.queue.submit(Write(key, chunk, inquiry=inquiry), until=self.clock.now() + patience)

    def while_waiting(self, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
        """Whoever waits for the queue waits on this clock; `then` happens meanwhile."""
        changed: Any = self.queue._changed

        def wait(seconds: float) -> bool:
            self.clock.time += seconds
            changed.release()
            try:
                then()
            finally:
                changed.acquire()
            return True

        monkeypatch.setattr(changed, "wait", wait)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.gate.set()
    desk.workers.close(20)


def test_a_write_of_what_is_being_written_stands_for_both(desk: Desk) -> None:
    first, second = Chunk(), Chunk()
    write = desk.submit(A, first)
    assert desk.submit(A, second) is write and second.releases == 1 and first.releases == 0
    assert desk.accepted == [A]
    desk.gate.set()
    assert desk.queue.wait(write, desk.clock.now() + 1) and first.releases == 1 and not desk.lost


def test_what_there_is_no_room_for_is_given_back(desk: Desk) -> None:
    large, more = Chunk(100), Chunk()
    write = desk.submit(A, large)
    assert write is not None, "one at a time goes, however large"
    assert desk.submit(B, more) is None and more.releases == 1 and not desk.queue.pending(B)
    assert desk.accepted == [A]
    desk.gate.set()
    assert desk.queue.wait(write, desk.clock.now() + 1) and desk.queue.waiting_bytes == 0


def test_room_is_not_waited_for_where_no_write_returns(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.submit(A, Chunk(30))
    desk.while_waiting(monkeypatch, lambda: None)
    began = desk.clock.now()
    assert desk.submit(B, Chunk(), patience=9.0) is None and not desk.lost
    assert desk.clock.now() - began <= 10.0 * HURRIED_SHARE
    began = desk.clock.now()
    assert desk.submit(B, Chunk(), patience=9.0) is None and desk.clock.now() == began, "it was waited for already"


def test_room_is_waited_for_as_long_as_writes_return(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[[], None]] = []

    def submit(run: Callable[[Any], None], count: int, *, seconds: float) -> list[Any]:
        calls.append(partial(run, Batch(desk.workers, run, 1, seconds, None)))
        return [None]

    monkeypatch.setattr(desk.workers, "submit_batch", submit)
    desk.gate.set()
    for key in (A, B, C):
        desk.submit(key, Chunk())
    due = [desk.clock.now() + 0.9 * number for number in (1, 2, 3)]

    def return_one() -> None:
        if due and desk.clock.now() >= due[0]:
            due.pop(0)
            calls.pop(0)()

    desk.while_waiting(monkeypatch, return_one)
    assert desk.submit(D, Chunk(30), patience=9.0) is not None and not due


def test_what_no_thread_takes_is_given_back(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BackendError("every thread hangs")

    monkeypatch.setattr(desk.workers, "submit_batch", refuse)
    chunk = Chunk()
    assert desk.submit(A, chunk) is None and chunk.releases == 1
    assert not desk.queue.pending(A) and desk.queue.waiting_bytes == 0


@pytest.mark.parametrize("fails", [True, False])
def test_what_is_late_is_lost_once_and_keeps_its_memory_until_it_returns(desk: Desk, fails: bool) -> None:
    chunk = Chunk()
    desk.fails = fails
    write = desk.submit(A, chunk)
    assert eventually(lambda: write.begun)
    desk.clock.time += 11
    assert desk.queue.stuck and write.outcome is False and not desk.queue.pending(A)
    assert desk.lost == ["deadline"] and chunk.releases == 0
    desk.gate.set()
    desk.workers.close(20)
    assert desk.lost == ["deadline"] and chunk.releases == 1


def test_what_is_queued_behind_a_write_that_hangs_is_lost_where_there_is_no_other_thread(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.workers.threads = 2
    chunks = [Chunk(), Chunk(), Chunk()]
    first = desk.submit(A, chunks[0])
    assert eventually(lambda: first.begun)

    def none_left(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(desk.clock, "spawn", none_left)
    desk.clock.time += 5
    behind = [desk.submit(key, chunk) for key, chunk in ((B, chunks[1]), (C, chunks[2]))]
    desk.clock.time += 6
    assert not desk.queue.stuck and first.outcome is False and behind[0].outcome is None, "it may still begin"
    desk.clock.time += 5
    assert not desk.queue.stuck
    assert [write.outcome for write in behind] == [False, False] and desk.queue.waiting_bytes == 0
    assert desk.lost == ["deadline"] * 3 and [chunk.releases for chunk in chunks] == [0, 1, 1]


def test_a_write_that_is_given_up_while_it_is_asked_about_is_never_accepted(desk: Desk) -> None:
    asked = threading.Event()

    def enough(key: ChunkKey) -> bool:
        asked.set()
        return not desk.gate.wait(20)

    chunk = Chunk()
    write = desk.submit(A, chunk, inquiry=SimpleNamespace(enough=enough, done=False))
    assert write is not None and asked.wait(20)
    desk.clock.time += 21
    assert desk.queue.stuck and len(desk.lost) == 1 and write.outcome is False
    desk.gate.set()
    assert eventually(lambda: chunk.releases == 1)
    assert not desk.accepted and not desk.batches


@pytest.fixture
def batching() -> Iterator[Desk]:
    """Writes that wait are stored together."""
    desk = Desk(batch_bytes=1 << 20)
    yield desk
    desk.gate.set()
    desk.workers.close(20)


def plugged(desk: Desk, *keys: ChunkKey) -> tuple[list[Any], list[Chunk]]:
    """Writes, and their chunks, that wait behind the first of them."""
    chunks = [Chunk(1) for _ in keys]
    writes = [desk.submit(keys[0], chunks[0])]
    assert eventually(lambda: bool(desk.batches))
    writes += [desk.submit(key, chunk) for key, chunk in zip(keys[1:], chunks[1:], strict=True)]
    return writes, chunks


def test_writes_that_wait_are_stored_together(batching: Desk) -> None:
    writes, chunks = plugged(batching, A, B, C, D)
    batching.gate.set()
    assert all(batching.queue.wait(write, batching.clock.now() + 1) for write in writes)
    assert batching.batches == [[A], [B, C, D]] and [chunk.releases for chunk in chunks] == [1] * 4
    assert batching.queue.waiting_bytes == 0 and not batching.lost and batching.workers.abandoned == 0


def test_a_write_that_was_given_up_is_in_no_batch(batching: Desk) -> None:
    (_, second, third), chunks = plugged(batching, A, B, C)
    batching.queue._lose([second], "deadline")
    assert [chunk.releases for chunk in chunks] == [0, 1, 0]
    batching.gate.set()
    assert batching.queue.wait(third, batching.clock.now() + 1)
    assert batching.batches == [[A], [C]] and [chunk.releases for chunk in chunks] == [1, 1, 1]


def test_a_batch_ends_before_what_the_store_is_still_asked_about(batching: Desk) -> None:
    plugged(batching, A, B)
    asked: Any = SimpleNamespace(done=False, enough=lambda key: False)
    known: Any = SimpleNamespace(done=True, enough=lambda key: key == D)
    later = [batching.submit(key, Chunk(1), inquiry=inquiry) for key, inquiry in ((D, known), (C, asked))]
    batching.gate.set()
    assert all(batching.queue.wait(write, batching.clock.now() + 1) for write in later)
    assert batching.batches == [[A], [B], [C]], "nothing waits for the answer, and the store has enough of D"
    assert batching.accepted == [A, B, C] and not batching.lost


@pytest.mark.parametrize("fails", [True, False])
def test_a_batch_that_is_late_is_lost_once_and_keeps_its_memory(batching: Desk, fails: bool) -> None:
    (_, *others), chunks = plugged(batching, A, B, C)
    release, told_first = threading.Event(), threading.Event()

    def store(writes: Sequence[Write], told: WriteTold) -> None:
        told(0, "")
        told_first.set()
        release.wait(20)
        if fails:
            raise OSError("no route")
        told(1, "")

    batching.queue._store = store
    batching.gate.set()
    assert told_first.wait(20) and batching.queue.wait(others[0], batching.clock.now() + 1)
    batching.clock.time += 9
    assert not batching.queue.stuck and others[1].outcome is None, "its time began with the outcome before"
    batching.clock.time += 2
    assert batching.queue.stuck and others[1].outcome is False and batching.lost == ["deadline"]
    assert [chunk.releases for chunk in chunks] == [1, 1, 0] and batching.workers.abandoned == 1
    release.set()
    assert eventually(lambda: chunks[2].releases == 1) and batching.lost == ["deadline"]
    assert eventually(lambda: batching.workers.abandoned == 0)


def test_what_a_batch_says_nothing_of_is_lost(batching: Desk) -> None:
    writes, chunks = plugged(batching, A, B, C)
    batching.queue._store = lambda writes, told: told(1, "")
    batching.gate.set()
    assert not batching.queue.wait(writes[1], batching.clock.now() + 1)
    assert batching.queue.wait(writes[2], batching.clock.now() + 1)
    assert batching.lost == ["write failed"] and [chunk.releases for chunk in chunks] == [1, 1, 1]
