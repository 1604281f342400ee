"""The pool: no two owners of a byte, none lost, none reused while somebody looks at it."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloom.memory import Pool
from kvloom.memory.extents import Extents
from kvloom.runtime import SystemRuntime

PAGE = 4096


class ExtentsAgainstAByteMap(RuleBasedStateMachine):
    """Extents beside the simplest thing that could be right: one flag per unit."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(64)
        self.free = [True] * 64
        self.taken: list[tuple[int, int]] = []

    @rule(size=st.integers(1, 40))
    def take(self, size: int) -> None:
        start = self.extents.take(size)
        runs = "".join("f" if free else "." for free in self.free).split(".")
        assert (start is None) == (max(map(len, runs)) < size)
        if start is not None:
            assert all(self.free[start : start + size])
            self.free[start : start + size] = [False] * size
            self.taken.append((start, size))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        start, size = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.extents.give(start, size)
        self.free[start : start + size] = [True] * size

    @invariant()
    def accounts_agree(self) -> None:
        runs = "".join("f" if free else "." for free in self.free).split(".")
        assert self.extents.free_bytes == sum(self.free)
        assert self.extents.largest == max(map(len, runs)), "neighbours are merged"


TestExtents = ExtentsAgainstAByteMap.TestCase
TestExtents.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def pool():
    pool = Pool(16 * PAGE, SystemRuntime())
    yield pool
    pool.close()


def test_memory_is_page_aligned_and_of_the_length_asked_for(pool: Pool) -> None:
    one, two = pool.reserve(1), pool.reserve(PAGE + 1)
    assert one is not None and two is not None
    assert (one.size, two.size) == (PAGE, 2 * PAGE) and len(two.view) == PAGE + 1
    for room in (one, two):
        assert torch.frombuffer(room.view, dtype=torch.uint8).data_ptr() % PAGE == 0


def test_view_and_tensor_are_the_same_memory(pool: Pool) -> None:
    room = pool.reserve(2 * PAGE)
    assert room is not None
    room.tensor((4,), torch.int32, offset=PAGE).fill_(7)
    assert bytes(room.view[PAGE : PAGE + 16]) == (7).to_bytes(4, "little") * 4


def test_a_block_is_free_when_dropped_and_no_longer_leased(pool: Pool) -> None:
    room = pool.reserve(PAGE)
    assert room is not None
    block = room.seal()
    assert block is not None
    first, second = block.lease(), block.lease()
    block.drop()
    block.drop()
    first.release()
    first.release()
    assert pool.used_bytes == PAGE, "still leased"
    second.release()
    assert pool.used_bytes == 0


def test_a_reservation_past_its_deadline_cannot_be_sealed(pool: Pool) -> None:
    late = pool.reserve(PAGE, deadline=pool.now() - 1)
    assert late is not None and late.seal() is None
    assert pool.used_bytes == 0


def test_what_is_forgotten_comes_back(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pool.reserve(PAGE)
    room = pool.reserve(PAGE)
    assert room is not None
    room.seal()
    room = pool.reserve(PAGE)
    assert room is not None
    block = room.seal()
    assert block is not None
    block.lease()
    block.drop()
    del room, block
    gc.collect()
    assert pool.used_bytes == 0
    assert "never released" in caplog.text, "a leaked lease is said to be one"


def test_a_full_pool_says_no_and_recovers(pool: Pool) -> None:
    rooms = [pool.reserve(4 * PAGE) for _ in range(4)]
    assert all(rooms) and pool.reserve(1) is None
    for room in rooms:
        assert room is not None
        room.abandon()
    whole = pool.reserve(16 * PAGE)
    assert whole is not None, "fragments were merged"


def test_a_large_pool_opens_without_touching_its_memory() -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = Pool(8 << 30, SystemRuntime())
    pool.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4 << 20, "KiB: less than 4 GiB"
