"""Rows of a host memory that is only pretended, to and from tiers: a job says which of its keys it has moved."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clock_support import Hang, skipping_clock

from kvloom import EngineConfig, KVSpec
from kvloom_backend_disk.backend import DiskBackend
from kvloom_connector_vllm.offload import tiers
from kvloom_connector_vllm.offload.rows import Done, RowStore
from kvloom_connector_vllm.offload.settings import PieceGeometry
from kvloom_connector_vllm.offload.tiers import Found, Tiers

SPEC = KVSpec(model="m", num_layers=1, num_kv_heads=1, head_size=1, dtype="uint8")
ROWS, ROW = 6, 64
KEYS = [hashlib.sha256(b"%d" % number).digest() + bytes(4) for number in range(10)]


class Host:
    """Host memory of an engine, and a store below it."""

    def __init__(self, folder: Path, *, deadline: str = "10s", **more: Any) -> None:
        config = EngineConfig.load({"tiers": [{"type": "disk", "path": str(folder / "kv"), "deadline": deadline}]})
        self.tiers = Tiers(config, SPEC, PieceGeometry(piece_bytes=[ROW]), timeout=5.0)
        self.memory = bytearray(ROWS * ROW)
        self.view = memoryview(self.memory).cast("B", (ROWS, ROW))
        self.store = RowStore(self.tiers, self.view, **more)

    def row(self, number: int) -> bytes:
        return bytes(self.memory[number * ROW : (number + 1) * ROW])

    def fill(self, number: int, key: bytes) -> None:
        self.memory[number * ROW : (number + 1) * ROW] = (key * 2)[:ROW]

    def look(self, key: bytes, request: str = "r") -> Found:
        until = time.monotonic() + 10
        while (found := self.store.lookup(key, request)) is Found.ASKED:
            self.store.end_step()
            assert time.monotonic() < until
        return found

    def done(self) -> list[Done]:
        self.store.drain()
        return self.store.finished()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    one = Host(tmp_path)
    yield one
    one.store.close()


def test_an_answer_and_a_row_take_few_steps(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(host, 1)
    monkeypatch.setattr(tiers, "IDLE_SECONDS", 30.0)
    steps = 0
    while host.store.lookup(KEYS[0], "r") is Found.ASKED:
        host.store.end_step()
        steps += 1
    host.store.load(7, KEYS[:1], [3], "r")
    while not host.store.finished():
        host.store.end_step()
        steps += 1
    assert steps <= 4


def stored(host: Host, count: int) -> None:
    for number in range(count):
        host.fill(number, KEYS[number])
    host.store.store(7, KEYS[:count], range(count))
    (done,) = host.done()
    assert host.store.flush(10)
    assert (done.job, done.keys, done.complete, done.bytes) == (7, tuple(KEYS[:count]), True, count * ROW)


def test_what_was_stored_is_found_and_loaded_into_other_rows(host: Host, tmp_path: Path) -> None:
    stored(host, 3)
    host.store.close()
    other = Host(tmp_path)
    assert [other.look(key) for key in KEYS[:4]] == [Found.HIT] * 3 + [Found.MISS]
    other.store.load(1, KEYS[:2], [5, 2], "r")
    (done,) = other.done()
    assert (done.job, done.complete) == (1, True)
    assert other.row(5) == (KEYS[0] * 2)[:ROW] and other.row(2) == (KEYS[1] * 2)[:ROW]
    assert not any(other.row(number) != bytes(ROW) for number in (0, 1, 3, 4))
    other.store.close()


def test_a_part_that_is_damaged_is_said_and_not_asked_for_again(host: Host, tmp_path: Path) -> None:
    stored(host, 3)
    host.store.close()
    digest = host.store._tiers._segments(KEYS[1:2])[0].key.digest.hex()
    (blob,) = [path for path in (tmp_path / "kv").rglob("[0-9]*-*") if path.name.endswith(digest)]
    data = bytearray(blob.read_bytes())
    data[-20] ^= 1
    blob.write_bytes(data)
    other = Host(tmp_path)
    assert [other.look(key) for key in KEYS[:3]] == [Found.HIT] * 3
    other.store.load(1, KEYS[:3], [0, 1, 2], "r")
    (done,) = other.done()
    assert (done.keys, done.complete) == ((KEYS[0], KEYS[2]), False)
    assert [other.look(key) for key in KEYS[:3]] == [Found.HIT, Found.MISS, Found.HIT]
    other.store.close()


def test_a_load_that_always_fails_is_not_promised_twice(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(host, 1)
    assert host.look(KEYS[0]) is Found.HIT
    monkeypatch.setattr(host.tiers, "load", lambda keys, **where: [False] * len(keys))
    host.store.load(1, KEYS[:1], [3], "r")
    (done,) = host.done()
    assert (done.keys, done.complete) == ((), False)
    assert host.look(KEYS[0]) is Found.MISS
    assert host.look(KEYS[0], "s") is Found.HIT, "the tiers still say so, and another request may try"


def test_a_job_ends_whatever_happens(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **more: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(host.tiers, "load", broken)
    monkeypatch.setattr(host.tiers, "save", broken)
    host.store.load(1, KEYS[:1], [0], "r")
    host.store.store(2, KEYS[:1], [0])
    assert sorted((done.job, done.complete) for done in host.done()) == [(1, False), (2, False)]
    host.store.close()
    host.store.load(3, KEYS[:1], [0], "r")
    assert [(done.job, done.complete) for done in host.store.finished()] == [(3, False)]


def test_hashes_that_may_collide_are_neither_kept_nor_found(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    short = b"12345678" + bytes(4)
    host.store.store(1, [short], [0])
    (done,) = host.done()
    assert not done.complete
    monkeypatch.setattr(host.tiers, "find", lambda keys: [True] * len(keys))
    assert host.look(KEYS[0]) is Found.HIT and host.look(short) is Found.MISS


def test_patience_ends_and_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    host = Host(tmp_path, patience=2.0, now=lambda: clock[0])
    hanging = threading.Event()
    monkeypatch.setattr(host.tiers, "find", lambda keys: [hanging.wait(10) for _ in keys])
    assert host.store.lookup(KEYS[0], "r") is Found.ASKED
    host.store.end_step()
    clock[0] = 2.1
    assert host.store.lookup(KEYS[0], "r") is Found.MISS
    hanging.set()
    host.store.close()


def test_a_question_ends_by_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with skipping_clock() as clock:
        hang = Hang(clock)
        monkeypatch.setattr(DiskBackend, "contains", lambda backend, key: hang("contains", key))
        host = Host(tmp_path, deadline="200s")
        assert host.tiers.find(KEYS[:2]) == [False, False] and hang.waiting == 1
        assert not [key for key in host.tiers.engine.counters() if key.name == "tier_error"], "the tier had time left"
        hang.open()
        host.store.close()


def test_the_memory_is_let_go_of(tmp_path: Path) -> None:
    host = Host(tmp_path)
    stored(host, 2)
    assert host.look(KEYS[0]) is Found.HIT
    host.store.load(1, KEYS[:1], [3], "r")
    host.done()
    host.store.close()
    host.store.close()
    host.view.release()  # BufferError if anybody still has it
    assert host.store.lookup(KEYS[0], "r") is Found.MISS


def test_jobs_that_closing_stops_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path)
    began, go_on = [threading.Event(), threading.Event()], threading.Event()
    waiting = iter(began)

    def load(keys: list[bytes], **where: Any) -> list[bool]:
        next(waiting).set()
        assert go_on.wait(30)
        return [True] * len(keys)

    monkeypatch.setattr(host.tiers, "load", load)
    for job in range(4):
        host.store.load(job, KEYS[:1], [job], "r")
    assert all(one.wait(30) for one in began)
    closing = threading.Thread(target=host.store.close)
    draining = threading.Thread(target=host.store.drain, daemon=True)
    draining.start()
    closing.start()
    while not host.store._closed:
        pass
    go_on.set()
    for thread in (closing, draining):
        thread.join(30)
        assert not thread.is_alive()
    assert sorted((done.job, done.complete) for done in host.store.finished()) == [
        (0, True), (1, True), (2, False), (3, False)
    ]  # fmt: skip
