"""The pool: memory goes from *reserved* to *sealed* to *leased* and back, without manual reference counts.

A reservation belongs to one writer. Sealing makes it a block: from then on its bytes do not change, and readers take
leases. The memory is free again when its owner has dropped the block and the last lease is released.

If a device copies asynchronously from or to the memory, record an event on the stream behind the last use and pass it
as `after` when giving the memory back. Until its `query()` is true, the memory stays in use.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from types import CodeType, TracebackType
from typing import Literal

import torch

from kvloom.forks import notify_after_fork
from kvloom.memory.device_pages import DevicePages, Done
from kvloom.memory.extents import Extents
from kvloom.memory.pages import PAGE_BYTES, Pages
from kvloom.memory.pinning import Pinner, pinner_for
from kvloom.runtime import Runtime

log = logging.getLogger(__name__)

_LARGE_BYTES = 4 << 20
_HEADROOM_BYTES = 16 << 10
_MANY = 32
_MOST_GRIDS = 1024

Origin = tuple[tuple[CodeType, int], ...]
"""Code and the offset of the instruction in it, the innermost first. Holds no frame, so nobody's local variables."""


def caller() -> Origin:
    """The four frames that called the function that calls this; fewer where there are fewer."""
    # Written out, because it runs for each lease: a loop takes twice as long.
    a = sys._getframe(1).f_back
    b = a.f_back if a is not None else None
    c = b.f_back if b is not None else None
    d = c.f_back if c is not None else None
    if a is None or b is None or c is None or d is None:
        return tuple((frame.f_code, frame.f_lasti) for frame in (a, b, c) if frame is not None)
    return (a.f_code, a.f_lasti), (b.f_code, b.f_lasti), (c.f_code, c.f_lasti), (d.f_code, d.f_lasti)


def in_words(origin: Origin) -> str:
    """`file:line in function`, the innermost first."""
    places = [f"{code.co_filename}:{_line(code, at)} in {code.co_name}" for code, at in origin]
    return ", called from ".join(places) or "an unknown place"


def _line(code: CodeType, offset: int) -> int | None:
    return next((line for start, end, line in code.co_lines() if start <= offset < end), code.co_firstlineno)


def lease_all(blocks: Sequence[Block], origin: Origin) -> list[Lease]:
    """Lease several blocks of one pool, for less than `Block.lease` of each."""
    if not blocks:
        return []
    with blocks[0]._pool.lock:
        for block in blocks:
            assert block._owned or block._leases, "leased after its memory was given back"
            block._leases += 1
    return [Lease(block, origin) for block in blocks]


def pages_of(nbytes: int) -> int:
    """`nbytes` in whole pages, at least one."""
    return max(PAGE_BYTES, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)


def taken_by(nbytes: int, capacity: int, *, largest_bytes: int) -> int:
    """`Pool.taken_by`, of a pool of `capacity` bytes in which the longest piece can have `largest_bytes`."""
    size = pages_of(nbytes)
    if size < _LARGE_BYTES or size * _MANY > capacity:
        return size
    unit = 1 << (size.bit_length() - 8)
    rounded = -(-(size + _HEADROOM_BYTES) // unit) * unit
    return rounded if rounded <= largest_bytes else size


class Reservation:
    """Memory to be filled. Seal it or abandon it; it does so itself when it is forgotten.

    It has one holder, and one more for each `hold`: whoever asked for it, and each call that still may write to it.
    """

    __slots__ = ("_holders", "_pool", "deadline", "nbytes", "origin", "size", "staged", "start")

    def __init__(self, pool: Pool, start: int, size: int, nbytes: int, deadline: float, origin: Origin) -> None:
        self.origin = origin
        self.start = start
        self.size = size
        """Bytes taken from the pool, see `Pool.taken_by`."""
        self.nbytes = nbytes
        """Bytes asked for."""
        self.deadline = deadline
        """Time after which the reservation cannot be sealed any more, because filling it has taken too long."""
        self.staged = 0
        """Bytes that count as staged, see `Pool.stage`."""
        self._holders = 1
        self._pool: Pool | None = pool

    @property
    def view(self) -> memoryview:
        """The memory as writable bytes."""
        assert self._pool is not None, "used after seal or abandon"
        return self._pool.pages.view[self.start : self.start + self.nbytes]

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, *, offset: int = 0) -> torch.Tensor:
        """The memory from byte `offset` as a tensor."""
        assert self._pool is not None, "used after seal or abandon"
        return self._pool.tensor(self.start + offset, shape, dtype)

    def hold(self) -> bool:
        """Add a holder; False if there is none left, and the memory may be in other use."""
        pool = self._pool
        if pool is None:
            return False
        with pool.lock:
            held = self._holders > 0
            self._holders += held
        return held

    def seal(self) -> Block | None:
        """The filled memory as a block, or None (and the memory is given back) if the deadline has passed.

        The caller is the only holder.
        """
        pool, self._pool = self._pool, None
        assert pool is not None, "sealed twice"
        assert self._holders == 1, "sealed while a call may still write to it"
        self._holders = 0
        if self.staged:
            pool.stage(-self.staged)
        if pool.now() > self.deadline:
            pool.free(self.start, self.size)
            return None
        return Block(pool, self.start, self.size, self.origin)

    def abandon(self, after: Done | None = None) -> None:
        """Give up one hold; the last gives the memory back (once `after` is over). Does nothing if there is none."""
        pool = self._pool
        if pool is None:
            return
        with pool.lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._pool = None
            if self.staged:
                pool.stage(-self.staged)
            pool.free(self.start, self.size, () if after is None else (after,))

    def __del__(self) -> None:
        pool: Pool | None = getattr(self, "_pool", None)  # its making may have been interrupted
        if pool is not None:
            self._holders = 1
            pool.forgotten.append((self.abandon, "a reservation", self.size, self.origin))


class Block:
    """Sealed memory: owned by the holder of this object, read through leases."""

    __slots__ = ("_after", "_leases", "_owned", "_pool", "origin", "size", "start")

    def __init__(self, pool: Pool, start: int, size: int, origin: Origin) -> None:
        self._pool = pool
        self.origin = origin
        self.start = start
        self.size = size
        self._leases = 0
        self._after: tuple[Done, ...] = ()
        self._owned = True

    @property
    def leased(self) -> bool:
        return self._leases > 0

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, *, offset: int = 0) -> torch.Tensor:
        """The memory from byte `offset` as a tensor; valid while the block is owned or leased."""
        return self._pool.tensor(self.start + offset, shape, dtype)

    def lease(self, origin: Origin | None = None) -> Lease:
        """Keep the memory from being reused until the lease is released. origin: `caller()`, once for many leases."""
        with self._pool.lock:
            assert self._owned or self._leases, "leased after its memory was given back"
            self._leases += 1
        return Lease(self, caller() if origin is None else origin)

    def drop(self) -> None:
        """Give up ownership: the memory is free once the last lease is released. Twice is fine."""
        with self._pool.lock:
            owned, self._owned = self._owned, False
            free = owned and not self._leases
        if free:
            self._pool.free(self.start, self.size, self._after)

    def _release(self, after: Done | None) -> None:
        known = self._after
        ahead = () if after is None else (*(one for one in known if not one.query()), after)
        with self._pool.lock:
            if after is not None:
                self._after = ahead if self._after is known else (*self._after, after)
            self._leases -= 1
            idle, owned = not self._leases, self._owned
        if idle:
            if owned:
                self._pool.tell()  # its owner may give it up now
            else:
                self._pool.free(self.start, self.size, self._after)

    def __del__(self) -> None:
        if getattr(self, "_owned", False):  # its making may have been interrupted
            self._pool.forgotten.append((self.drop, "a block", self.size, self.origin))


class Lease:
    """The right to read a block. Release it, or use it as a context manager; it does not expire."""

    __slots__ = ("block", "origin")
    intact = True
    """Nothing but this process changes the memory."""
    store = ""
    """The tier whose memory it is; empty, since it is the pool's."""

    def __init__(self, block: Block, origin: Origin) -> None:
        self.origin = origin
        self.block: Block | None = block

    def again(self) -> Lease:
        """Another lease on the same block."""
        assert self.block is not None, "leased again after its release"
        return self.block.lease(caller())

    def release(self, after: Done | None = None) -> None:
        """Give it back; the memory is not reused before `after` is over. Twice is fine."""
        block, self.block = self.block, None
        if block is not None:
            block._release(after)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        block: Block | None = getattr(self, "block", None)  # its making may have been interrupted
        if block is not None:
            block._pool.forgotten.append((self.release, "a lease", block.size, self.origin))


class Pool:
    """`capacity` bytes of memory in page-aligned pieces. Allocation is O(log n) and scans nothing."""

    def __init__(
        self, capacity: int, runtime: Runtime, *, device: torch.device | None = None,
        pin: Literal["auto"] | bool | Pinner = "auto", eager: bool = False, piece_bytes: int = 0,
    ) -> None:  # fmt: skip
        """device: where the memory is, which is then taken at once, and has no `view`. None: the host's.

        pin: whether host memory is pinned, once the process has initialised CUDA (see `kvloom.memory.pinning`; False:
        never), in slabs of at least 256 MiB and 32 times `piece_bytes`, the largest piece that will be asked for.

        eager: all of it is pinned once it can be, in the background; else a little ahead of its use.
        """
        self.capacity = capacity // PAGE_BYTES * PAGE_BYTES
        self.pages = (
            Pages(self.capacity, runtime, pinner=pinner_for(pin), eager=eager, piece_bytes=piece_bytes)
            if device is None
            else DevicePages(self.capacity, device)
        )
        ends = self.pages.slab_ends
        self.largest_bytes = max(end - start for start, end in zip((0, *ends), ends, strict=False))
        """The most that can be reserved in one piece."""
        self.now = runtime.now
        self.staged_bytes = 0
        """Held by reservations for longer than a copy takes."""
        self._runtime = runtime
        # Held for a few dictionary operations, never across I/O, a copy or a foreign call.
        self.lock = runtime.lock()
        self.leaked = 0
        """Number of leases, reservations and blocks that were garbage-collected without being given back."""
        # What `__del__` wants done. The garbage collector may call it on a thread that holds the lock, so it must not
        # take one: the next `reserve` does the work.
        self.forgotten: deque[tuple[Callable[[], None], str, int, Origin]] = deque()
        self.times_freed = 0
        """Grows whenever something is given back, or is in use no more."""
        self._freed = runtime.condition()
        self._waiting = 0
        self._extents = Extents(self.capacity, ends[:-1])
        self._grids: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}
        # Memory that was given back and that a device still uses.
        self._later: deque[tuple[int, int, tuple[Done, ...]]] = deque()
        self._gone = False
        notify_after_fork(self)

    def after_fork_in_child(self, pid: int) -> None:
        """In a forked child, where the memory reads as zeros: there is no room, and nothing comes back."""
        self.lock, self._freed = self._runtime.lock(), self._runtime.condition()
        self._leave()
        self.forgotten.clear()
        self._later.clear()

    def _leave(self) -> None:
        """From now on there is no memory to give out, and none to take back."""
        self._gone = True
        self._extents = Extents(0)

    def taken_by(self, nbytes: int) -> int:
        """Bytes that a reservation of `nbytes` takes.

        Large pieces are rounded up by less than a part in 60, so that a chunk and the same chunk with a header before
        it are of one length: otherwise each gap that one leaves is too short for the other. Not where few fit.
        """
        return taken_by(nbytes, self.capacity, largest_bytes=self.largest_bytes)

    @property
    def pinned(self) -> bool:
        """Some of it is pinned, for a device that this process uses."""
        return isinstance(self.pages, Pages) and self.pages.pinned_bytes > 0

    @property
    def widest(self) -> tuple[int, int]:
        """The begin and end of the longest free extent; (0, 0) if there is none."""
        with self.lock:
            return self._extents.widest

    @property
    def used_bytes(self) -> int:
        self._collect()
        return 0 if self._gone else self.capacity - self._extents.free_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in no use, not all of them beside each other."""
        return self._extents.free_bytes

    def reserve(self, nbytes: int, *, deadline: float = math.inf) -> Reservation | None:
        """Memory for `nbytes` bytes, or None if there is no free extent that long."""
        self._collect()
        size = self.taken_by(nbytes)
        with self.lock:
            start = self._extents.take(size)
        if start is None:
            return None
        self.pages.reach(start + size)
        return Reservation(self, start, size, nbytes, deadline, caller())

    def stage(self, nbytes: int) -> bool:
        """Count `nbytes` more as staged; False if that were over half of the pool: the other half is for copies.

        Negative: count fewer.
        """
        self._collect()
        with self.lock:
            fits = nbytes < 0 or self.staged_bytes + nbytes <= self.capacity // 2
            self.staged_bytes += nbytes if fits else 0
        return fits

    def wait_for_room(self, until: float, freed: int) -> None:
        """Block until `times_freed` is no longer `freed`, a moment has passed, or `until`."""
        with self._freed:
            self._waiting += 1
            left = until - self.now()
            if left > 0 and self.times_freed == freed:
                # Neither forgotten leases nor a device wake this up.
                self._freed.wait(min(left, 0.001 if self._later else 0.05))
            self._waiting -= 1

    def tensor(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The memory from byte `start` as a tensor."""
        shape = tuple(shape)
        place, rest = divmod(start, PAGE_BYTES)
        if rest:
            return self.pages.bytes[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        # An index into one tensor of all pages where such a tensor may begin: unlike `view`, it keeps the GIL, which a
        # thread that reads many chunks would otherwise have to wait for again and again.
        grid = self._grids.get((shape, dtype))
        return (self._grid(shape, dtype) if grid is None else grid)[place]

    def _grid(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        places = (self.capacity - nbytes) // PAGE_BYTES + 1
        size, stride = (places, *shape), (PAGE_BYTES // dtype.itemsize, *strides)
        grid = self.pages.bytes.view(dtype).as_strided(size, stride)
        if len(self._grids) >= _MOST_GRIDS:
            self._grids.clear()
        self._grids[shape, dtype] = grid
        return grid

    def free(self, start: int, size: int, after: tuple[Done, ...] = ()) -> None:
        if self._gone:
            return
        if not all(one.query() for one in after):
            self._later.append((start, size, after))
            return
        with self.lock:
            self._extents.give(start, size)
        self.tell()

    def tell(self) -> None:
        """Wake up the threads that wait for room."""
        self.times_freed += 1
        # Whoever begins to wait from here on sees the new number first.
        if self._waiting:
            with self._freed:
                self._freed.notify_all()

    def _collect(self) -> None:
        for _ in range(len(self._later)):
            try:
                self.free(*self._later.popleft())
            except IndexError:
                break
        while self.forgotten:
            try:
                give_back, what, size, origin = self.forgotten.popleft()
            except IndexError:  # another thread was quicker
                return
            with self.lock:
                self.leaked += 1
            log.warning(
                "%s of %d bytes was never given back; it is now. It was taken at %s", what, size, in_words(origin)
            )
            give_back()

    def close(self) -> None:
        """Stop the background thread. Memory still in use stays valid; if there is none, the system gets it back, also
        as long as the garbage collector has not found what refers to the pool, and there is no room from then on."""
        if self._gone:
            return
        self._collect()
        self.pages.close()
        with self.lock:
            unused = self._extents.free_bytes == self.capacity
            if unused:  # a call that is still running must not reserve what is being given back
                self._leave()
        if unused:
            self.pages.give_back()
        self._grids.clear()
