"""The pool: no two owners of a byte, none lost, none reused while somebody looks at it."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable

import pytest
import torch
from core_support import kv_of, tokens_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvloom import Engine
from kvloom.memory import Lease, Pool
from kvloom.memory.extents import Extents
from kvloom.runtime import SystemRuntime

PAGE = 4096


class ExtentsAgainstAByteMap(RuleBasedStateMachine):
    """Extents beside the simplest thing that could be right: one flag per unit."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(64)
        self.cuts: set[int] = set()
        self.free = [True] * 64
        self.taken: list[tuple[int, int]] = []

    @initialize(cuts=st.sets(st.integers(1, 63), max_size=3))
    def cut(self, cuts: set[int]) -> None:
        self.cuts = cuts
        self.extents = Extents(64, cuts)

    def runs(self) -> list[int]:
        """The lengths of what is free and in one piece."""
        text = ""
        for index, free in enumerate(self.free):
            text += (" " if index in self.cuts else "") + ("f" if free else " ")
        return [len(run) for run in text.split()] or [0]

    @rule(size=st.integers(1, 40))
    def take(self, size: int) -> None:
        start = self.extents.take(size)
        assert (start is None) == (max(self.runs()) < size)
        if start is not None:
            assert not any(start < cut < start + size for cut in self.cuts)
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
        assert self.extents.free_bytes == sum(self.free)
        assert self.extents.largest == max(self.runs()), "neighbours are merged"
        start, end = self.extents.widest
        assert end - start == self.extents.largest and all(self.free[start:end])


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
    for reservation in (one, two):
        assert torch.frombuffer(reservation.view, dtype=torch.uint8).data_ptr() % PAGE == 0


def test_view_and_tensor_are_the_same_memory(pool: Pool) -> None:
    reservation = pool.reserve(2 * PAGE)
    assert reservation is not None
    reservation.tensor((4,), torch.int32, offset=PAGE).fill_(7)
    assert bytes(reservation.view[PAGE : PAGE + 16]) == (7).to_bytes(4, "little") * 4


def test_a_block_is_free_when_dropped_and_no_longer_leased(pool: Pool) -> None:
    reservation = pool.reserve(PAGE)
    assert reservation is not None
    block = reservation.seal()
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


def line_of(function: Callable[..., object], text: str) -> str:
    """`file:line` of the line with `text` in a function."""
    lines, first = inspect.getsourcelines(function)
    (index,) = (index for index, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function)}:{first + index} in {function.__name__}"


def take_a_lease(pool: Pool) -> Lease:
    reservation = pool.reserve(PAGE)  # the reservation
    assert reservation is not None
    block = reservation.seal()
    assert block is not None
    try:
        return block.lease()  # the lease
    finally:
        block.drop()


def test_what_is_forgotten_comes_back_and_is_said_to_have_been(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    def three() -> None:
        pool.reserve(PAGE)  # forgotten at once
        reservation = pool.reserve(2 * PAGE)  # sealed, then forgotten
        assert reservation is not None
        reservation.seal()
        take_a_lease(pool)  # never released

    three()
    gc.collect()
    assert pool.used_bytes == 0 and pool.leaked == 3
    reservation, block, lease = (record.getMessage() for record in caplog.records)
    assert reservation.startswith("a reservation of 4096 bytes") and line_of(three, "# forgotten at") in reservation
    assert block.startswith("a block of 8192 bytes") and line_of(three, "# sealed") in block
    assert lease.startswith("a lease of 4096 bytes")
    assert lease.index(line_of(take_a_lease, "# the lease")) < lease.index(line_of(three, "# never"))
    assert not any("kvloom/memory" in record.getMessage() for record in caplog.records), "where the user took it"
    assert {record.name for record in caplog.records} == {"kvloom.memory.pool"}


def test_a_lease_taken_again_is_named_after_who_took_it_again(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    lease = take_a_lease(pool)

    def again() -> None:
        lease.again()  # forgotten

    again()
    lease.release()
    gc.collect()
    assert pool.used_bytes == 0
    (record,) = caplog.records
    assert f"It was taken at {line_of(again, '# forgotten')}" in record.getMessage()


def test_what_was_given_back_is_no_leak(pool: Pool) -> None:
    take_a_lease(pool).release()
    reservation = pool.reserve(PAGE)
    assert reservation is not None
    reservation.abandon()
    late = pool.reserve(PAGE, deadline=pool.now() - 1)
    assert late is not None and late.seal() is None
    del reservation, late
    gc.collect()
    assert pool.used_bytes == 0 and pool.leaked == 0


def test_a_noted_origin_holds_no_local_variable(pool: Pool) -> None:
    class Precious:
        pass

    def take() -> tuple[Lease, weakref.ref[Precious]]:
        precious = Precious()
        return take_a_lease(pool), weakref.ref(precious)

    lease, precious = take()
    assert precious() is None
    lease.release()


def test_leaks_are_found_at_the_latest_when_the_pool_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool(PAGE, SystemRuntime())
    take_a_lease(pool)
    gc.collect()
    pool.close()
    assert pool.leaked == 1 and "take_a_lease" in caplog.text


def test_a_full_pool_says_no_and_recovers(pool: Pool) -> None:
    reservations = [pool.reserve(4 * PAGE) for _ in range(4)]
    assert all(reservations) and pool.reserve(1) is None
    for reservation in reservations:
        assert reservation is not None
        reservation.abandon()
    whole = pool.reserve(16 * PAGE)
    assert whole is not None, "fragments were merged"


@example(nbytes=(1 << 33) // 40 // PAGE * PAGE, capacity=1 << 33, slabs=40)
@given(nbytes=st.integers(1, 1 << 30), capacity=st.integers(1 << 20, 1 << 38), slabs=st.integers(1, 40))
def test_rounding_takes_little_and_never_what_cannot_be_had(nbytes: int, capacity: int, slabs: int) -> None:
    pool = unopened(capacity)
    pool.largest_bytes = capacity // slabs // PAGE * PAGE
    taken = pool.taken_by(nbytes)
    assert taken % PAGE == 0 and nbytes <= taken <= max(PAGE, nbytes + max(PAGE, nbytes // 60))
    assert taken == -(-nbytes // PAGE) * PAGE or taken <= pool.largest_bytes


@given(power=st.integers(22, 30), header=st.integers(0, 16 << 10))
def test_a_chunk_is_as_long_as_the_same_chunk_with_a_header(power: int, header: int) -> None:
    pool = unopened(1 << 38)
    assert pool.taken_by((1 << power) + header) == pool.taken_by(1 << power)


def unopened(capacity: int) -> Pool:
    pool = Pool.__new__(Pool)  # without the address space
    pool.capacity = pool.largest_bytes = capacity // PAGE * PAGE
    return pool


def test_a_large_pool_opens_without_touching_its_memory() -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = Pool(8 << 30, SystemRuntime())
    pool.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4 << 20, "KiB: less than 4 GiB"


def test_memory_goes_back_with_its_last_holder() -> None:
    pool = Pool(PAGE, SystemRuntime())
    reservation = pool.reserve(PAGE)
    assert reservation is not None and reservation.hold()
    reservation.abandon()
    assert pool.reserve(PAGE) is None, "a call may still write to it"
    reservation.abandon()
    assert not reservation.hold(), "it is somebody else's by now"
    again = pool.reserve(PAGE)
    assert again is not None
    reservation.abandon()
    assert pool.reserve(PAGE) is None
    again.abandon()
    assert pool.used_bytes == pool.leaked == 0
    pool.close()


def test_half_of_a_pool_may_be_staged() -> None:
    pool = Pool(4 * PAGE, SystemRuntime())
    assert pool.stage(2 * PAGE) and not pool.stage(PAGE)
    pool.stage(-PAGE)
    assert pool.stage(PAGE)
    pool.close()


@pytest.mark.parametrize("in_use", [False, True])
def test_a_closed_pool_gives_back_memory_that_nobody_uses(in_use: bool) -> None:
    pool = Pool(2 * PAGE, SystemRuntime())
    lease = take_a_lease(pool)
    pool.pages.view[:] = b"\1" * len(pool.pages.view)
    if not in_use:
        lease.release()
    pool.close()
    assert any(pool.pages.view) == in_use, "memory that has gone back reads as zeros"
    assert (pool.reserve(PAGE) is None) == (not in_use), "what is written there may be lost: there is no room"
    lease.release()
    assert not pool.used_bytes


def test_a_closed_engine_gives_its_memory_back(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine({"type": "memory", "capacity": "1MiB"})
    engine.store(tokens_of(16), kv=kv_of(16))
    memory = engine._stack.memory.pool.pages.view
    assert any(memory)
    engine.close()
    assert not any(memory)
