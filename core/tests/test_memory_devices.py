"""Pools on a device: memory is reused only when the device is done with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from kvloom.memory import Pool
from kvloom.memory.device_pages import DevicePages
from kvloom.runtime import SystemRuntime

PAGE = 4096
RUNTIME = SystemRuntime()


class Copy:
    """Work that was queued on a device."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over


@pytest.fixture
def device() -> Iterator[Pool]:
    pool = Pool(4 * PAGE, RUNTIME, device=torch.device("meta"))
    yield pool
    pool.close()
    assert pool.leaked == 0


def test_device_memory_is_handed_out_as_tensors(device: Pool) -> None:
    reservation = device.reserve(2 * PAGE)
    assert reservation is not None
    tensor = reservation.tensor((2, 16), torch.bfloat16, offset=64)
    assert tensor.device.type == "meta" and tensor.shape == (2, 16) and tensor.dtype is torch.bfloat16
    with pytest.raises(TypeError, match="Python cannot read memory of meta; use `tensor`"):
        _ = reservation.view
    block = reservation.seal()
    assert block is not None
    with block.lease():
        block.drop()
        assert device.used_bytes == 2 * PAGE
    assert device.used_bytes == 0


def test_tensors_of_one_piece_of_a_device_share_its_memory() -> None:
    memory = DevicePages(2 * PAGE, torch.device("cpu"))
    memory.bytes[:8].view(torch.int64).fill_(7)
    assert memory.bytes[0] == 7 and memory.settled and memory.slab_ends == (2 * PAGE,)


@pytest.mark.parametrize("in_use", [False, True])
def test_a_closed_pool_of_a_device_keeps_memory_that_is_in_use(in_use: bool) -> None:
    pool = Pool(2 * PAGE, RUNTIME, device=torch.device("cpu"))
    reservation = pool.reserve(PAGE)
    assert reservation is not None
    if not in_use:
        reservation.abandon()
    pool.close()
    if in_use:
        reservation.tensor((2, 16), torch.bfloat16).fill_(1)
        reservation.abandon()
    assert len(pool.pages.bytes) == in_use * 2 * PAGE
    assert (pool.reserve(PAGE) is None) == (not in_use)


def test_memory_is_reused_only_after_the_device_is_done_with_it(device: Pool) -> None:
    copies = [Copy() for _ in range(4)]
    reservations = [device.reserve(PAGE) for _ in range(4)]
    for reservation, copy in zip(reservations, copies, strict=True):
        assert reservation is not None
        reservation.abandon(after=copy)
    assert device.reserve(PAGE) is None and device.used_bytes == 4 * PAGE
    copies[2].over = True
    reservation = device.reserve(PAGE)
    assert reservation is not None and reservation.start == 2 * PAGE, "the others are still being copied"
    assert device.reserve(PAGE) is None
    reservation.abandon()
    for copy in copies:
        copy.over = True
    assert device.used_bytes == 0


def test_a_block_waits_for_every_copy_of_every_reader(device: Pool) -> None:
    reservation = device.reserve(PAGE)
    assert reservation is not None
    block = reservation.seal()
    assert block is not None
    first, second, third = Copy(), Copy(), Copy()
    block.lease().release(after=first)
    lease, other = block.lease(), block.lease()
    block.drop()
    lease.release(after=second)
    other.release(after=third)
    for copy in (second, first):
        assert device.used_bytes == PAGE
        copy.over = True
    assert device.used_bytes == PAGE
    third.over = True
    assert device.used_bytes == 0


def test_a_block_that_is_dropped_last_waits_too(device: Pool) -> None:
    reservation = device.reserve(PAGE)
    assert reservation is not None
    block = reservation.seal()
    assert block is not None
    copy = Copy()
    block.lease().release(after=copy)
    block.drop()
    assert device.used_bytes == PAGE
    copy.over = True
    assert device.used_bytes == 0


def test_copies_that_are_over_are_not_remembered(device: Pool) -> None:
    reservation = device.reserve(PAGE)
    assert reservation is not None
    block = reservation.seal()
    assert block is not None
    for _ in range(100):
        copy = Copy()
        block.lease().release(after=copy)
        copy.over = True
    assert len(block._after) == 1
    block.drop()
    assert device.used_bytes == 0


def test_who_waits_for_room_sees_that_a_device_is_done(device: Pool) -> None:
    copy = Copy()
    reservation = device.reserve(4 * PAGE)
    assert reservation is not None
    reservation.abandon(after=copy)
    threading.Timer(0.05, lambda: setattr(copy, "over", True)).start()
    until = RUNTIME.now() + 20
    while (reservation := device.reserve(PAGE)) is None:
        assert RUNTIME.now() < until
        device.wait_for_room(until, device.times_freed)
    reservation.abandon()
