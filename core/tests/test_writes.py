"""The write queue: what it takes on it gives back once, whatever comes of the write, and says so once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from core_support import eventually

from kvloom import BackendError, ChunkKey
from kvloom.runtime import SystemRuntime, Workers
from kvloom.tiers.writes import WriteQueue

A, B = (ChunkKey("f/-", number, bytes([number]) * 32) for number in range(2))


class Clock(SystemRuntime):
    """Moved by hand."""

    time = 100.0

    def now(self) -> float:  # type: ignore[override]
        return self.time


class Chunk:
    """What the queue sees of a leased chunk."""

    def __init__(self, nbytes: int = 10) -> None:
        self.chunk = SimpleNamespace(nbytes=nbytes)
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


class Desk:
    """A queue for 30 bytes with one thread, which works once the gate is open."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.lost: list[str] = []
        self.accepted: list[ChunkKey] = []
        self.gate = threading.Event()
        self.workers = Workers(self.clock, name="test-write", threads=1)
        self.queue = WriteQueue(
            self.workers, self.clock, deadline=10.0, max_bytes=30,
            on_lost=lambda write, reason: self.lost.append(reason), on_late=lambda: None,
        )  # fmt: skip

    def submit(self, key: ChunkKey, chunk: Chunk, *, fails: bool = False) -> Any:
        def store() -> bool:
            self.gate.wait(20)
            if fails:
                raise OSError("no route")
            return True

        loaded: Any = chunk
        return self.queue.submit(key, store, loaded, until=self.clock.now(), accepted=lambda: self.accepted.append(key))


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


def test_what_no_thread_takes_is_given_back(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BackendError("every thread hangs")

    monkeypatch.setattr(desk.workers, "submit", refuse)
    chunk = Chunk()
    assert desk.submit(A, chunk) is None and chunk.releases == 1
    assert not desk.queue.pending(A) and desk.queue.waiting_bytes == 0


@pytest.mark.parametrize("fails", [True, False])
def test_what_is_late_is_lost_once_and_keeps_its_memory_until_it_returns(desk: Desk, fails: bool) -> None:
    chunk = Chunk()
    write = desk.submit(A, chunk, fails=fails)
    assert eventually(lambda: write.began is not None)
    desk.clock.time += 11
    assert desk.queue.stuck and write.outcome is False and not desk.queue.pending(A)
    assert desk.lost == ["deadline"] and chunk.releases == 0
    desk.gate.set()
    desk.workers.close(20)
    assert desk.lost == ["deadline"] and chunk.releases == 1
