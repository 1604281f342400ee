"""Sharing between operations: one wait for all that they wait for, and one read of a chunk for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kvloom import Chunk, ChunkKey, MemoryFormat
from kvloom.builtin.dict_backend import DictBackend
from kvloom.contracts.component import Config
from kvloom.memory import Pool
from kvloom.runtime import SystemRuntime
from kvloom.telemetry.events import EventBus
from kvloom.tiers.memory.tier import MemoryTier
from kvloom.tiers.request_context import RequestContext
from kvloom.tiers.stored.calls import Calls
from kvloom.tiers.stored.inflight import InflightRead, InflightReads, Read, Wanted
from kvloom.tiers.tier import Layout, Loaded

PAGE = 4096
SHAPE = (2, 1, 4, PAGE // 8)
KEY = ChunkKey("f/-", 0, bytes(32))


class Clock(SystemRuntime):
    """Time stands still unless it is moved."""

    time = 100.0

    def now(self) -> float:
        return self.time


def test_all_that_an_operation_waits_for_takes_one_deadline_together() -> None:
    clock = Clock()
    context = RequestContext(clock, 10.0, since=0)
    assert context.patience(4.0) == 104.0, "a call has its own deadline"
    clock.time += 7
    assert context.patience(10.0) == 110.0, "what one tier has cost is not there for the next"
    context.progress()
    assert context.patience(10.0) == 117.0


def by_layer(*args: object) -> None:
    raise AssertionError("nothing here is read by layers")


class Store:
    """The reads of one tier into a memory tier with room for `pages` chunks of one page."""

    def __init__(self, pages: int) -> None:
        runtime = SystemRuntime()
        events = EventBus((), runtime)
        layout = Layout(MemoryFormat.KV_BLOB, torch.uint8, lambda tokens: SHAPE)
        self.pool = Pool(pages * PAGE, runtime)
        self.memory = MemoryTier(layout, self.pool, events, runtime)
        self.calls = Calls("dict", DictBackend(Config()), events, runtime, deadline=20.0)
        self.inflight = InflightReads(self.calls, self.memory.invalidations, layout, runtime, by_layer)
        self.gate = threading.Event()
        self.loads = 0
        self._runtime = runtime

    def context(self) -> RequestContext:
        return RequestContext(self._runtime, 20.0, since=self.memory.invalidations.mark())

    def begin(self) -> Read:
        read = self.inflight.begin_or_join([Wanted(KEY, SHAPE, 4)], self.load, self.context())[0]
        assert isinstance(read, Read)
        return read

    def load(
        self, begun: Sequence[InflightRead], wanted: Callable[[int], bool], tell: Callable[[int, Loaded | None], None]
    ) -> None:
        """A chunk of sevens, once the gate is open."""
        self.gate.wait(20)
        self.loads += 1
        reservation = self.memory.reserve(PAGE)
        assert reservation is not None
        chunk = Chunk(reservation.tensor(SHAPE, torch.uint8).fill_(7), MemoryFormat.KV_BLOB, 4)
        block = reservation.seal()
        assert block is not None
        tell(0, self.memory.insert(KEY, chunk, block))


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(pages=1)
    yield store
    store.gate.set()
    store.calls.close()
    store.memory.close()
    store.pool.close()
    assert store.pool.leaked == 0


@pytest.mark.parametrize("first", [0, 1, 2])
def test_each_of_those_who_share_a_read_has_a_lease_of_its_own(store: Store, first: int) -> None:
    reads = [store.begin() for _ in range(3)]
    store.gate.set()
    shares = []
    for read in reads:
        assert read is not None
        shares.append(store.inflight.collect(read))
    assert store.loads == 1
    while shares:
        got = shares.pop(first if first < len(shares) else 0)
        assert got is not None and bool((got.chunk.tensor == 7).all())
        assert store.memory.reserve(PAGE) is None, "nobody else is given memory that is being read"
        got.release()
    reservation = store.memory.reserve(PAGE)
    assert reservation is not None, "and all of it is given back"
    reservation.abandon()


def test_who_gives_up_leaves_the_lease_to_the_others(store: Store) -> None:
    one, other = (store.begin() for _ in range(2))
    assert one is not None and other is not None
    store.inflight.leave(one.inflight)
    store.gate.set()
    got = store.inflight.collect(other)
    assert got is not None and store.memory.reserve(PAGE) is None
    got.release()
    reservation = store.memory.reserve(PAGE)
    assert reservation is not None
    reservation.abandon()


def test_what_nobody_collects_is_given_back(store: Store) -> None:
    reads = [store.begin() for _ in range(2)]
    store.gate.set()
    for read in reads:
        assert read is not None
        store.inflight.leave(read.inflight)
    until = time.monotonic() + 20
    while (reservation := store.memory.reserve(PAGE)) is None and time.monotonic() < until:
        time.sleep(0.001)
    assert reservation is not None
    reservation.abandon()


def test_a_read_from_before_a_removal_is_not_shared(store: Store) -> None:
    before, same = (store.begin() for _ in range(2))
    with store.memory.invalidations.removing([KEY]):
        pass
    after = store.begin()
    assert before is not None and same is not None and after is not None
    assert same.inflight is before.inflight is not after.inflight
    for read in (before, same, after):
        store.inflight.leave(read.inflight)


def test_what_was_shared_or_leased_is_given_back_if_the_rest_cannot_be_begun(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leased:
        released = False

        def release(self) -> None:
            self.released = True

    def fail(*_: object) -> None:
        raise MemoryError

    def in_memory(lacking: Sequence[ChunkKey]) -> Any:
        return [leased, *[None] * (len(lacking) - 1)]

    joined, leased = store.begin(), Leased()
    keys = [KEY, *(ChunkKey(KEY.namespace, number, KEY.digest) for number in (8, 9))]
    monkeypatch.setattr(InflightReads, "_begin_whole", fail)
    with pytest.raises(MemoryError):
        store.inflight.begin_or_join(
            [Wanted(key, SHAPE, 4) for key in keys], store.load, store.context(), in_memory=in_memory
        )
    assert leased.released and joined.inflight.shares == 1
    store.inflight.leave(joined.inflight)
