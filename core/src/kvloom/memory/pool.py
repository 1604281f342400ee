"""The pool: memory goes from *reserved* to *sealed* to *leased* and back, and nobody counts references by hand.

A reservation belongs to one writer. Sealing makes it a block: from then on its bytes do not change, and readers take
leases. The memory is free again when its owner has dropped the block and the last lease is released.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from kvloom.memory.extents import Extents
from kvloom.memory.origin import Origin, caller, in_words
from kvloom.memory.pages import PAGE_BYTES, Pages
from kvloom.runtime import Runtime, opened

log = logging.getLogger(__name__)


def pages_of(nbytes: int) -> int:
    """Bytes that a reservation of `nbytes` takes: whole pages, at least one."""
    return max(PAGE_BYTES, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)


class Reservation:
    """Memory that one writer may fill. Seal it or abandon it; it does so itself when it is forgotten."""

    __slots__ = ("_pool", "deadline", "nbytes", "origin", "size", "start")

    def __init__(self, pool: Pool, start: int, size: int, nbytes: int, deadline: float, origin: Origin) -> None:
        self._pool: Pool | None = pool
        self.origin = origin
        self.start = start
        self.size = size
        """Bytes taken from the pool, a whole number of pages."""
        self.nbytes = nbytes
        """Bytes asked for."""
        self.deadline = deadline
        """After it the reservation cannot be sealed any more: whoever fills it has taken too long."""

    @property
    def view(self) -> memoryview:
        """The memory as writable bytes."""
        assert self._pool is not None, "used after seal or abandon"
        return self._pool.pages.view[self.start : self.start + self.nbytes]

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, *, offset: int = 0) -> torch.Tensor:
        """The memory from byte `offset` as a tensor."""
        assert self._pool is not None, "used after seal or abandon"
        return self._pool.tensor(self.start + offset, shape, dtype)

    def seal(self) -> Block | None:
        """The filled memory as a block, or None (and the memory is given back) if the deadline has passed."""
        pool, self._pool = self._pool, None
        assert pool is not None, "sealed twice"
        if pool.now() > self.deadline:
            pool.free(self.start, self.size)
            return None
        return Block(pool, self.start, self.size, self.origin)

    def abandon(self) -> None:
        """Give the memory back. Twice is fine."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.free(self.start, self.size)

    def __del__(self) -> None:
        if self._pool is not None:
            self._pool.forgotten.append((self.abandon, "a reservation", self.size, self.origin))


class Block:
    """Sealed memory: owned by whoever holds this, read by whoever holds a lease."""

    __slots__ = ("_leases", "_owned", "_pool", "origin", "size", "start")

    def __init__(self, pool: Pool, start: int, size: int, origin: Origin) -> None:
        self._pool = pool
        self.origin = origin
        self._owned = True
        self._leases = 0
        self.start = start
        self.size = size

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
            self._pool.free(self.start, self.size)

    def _release(self) -> None:
        with self._pool.lock:
            self._leases -= 1
            idle, owned = not self._leases, self._owned
        if idle:
            if owned:
                self._pool.tell()  # its owner may give it up now
            else:
                self._pool.free(self.start, self.size)

    def __del__(self) -> None:
        if self._owned:
            self._pool.forgotten.append((self.drop, "a block", self.size, self.origin))


class Lease:
    """The right to read a block. Release it, or use it as a context manager; it does not expire."""

    __slots__ = ("block", "origin")

    def __init__(self, block: Block, origin: Origin) -> None:
        self.block: Block | None = block
        self.origin = origin

    def again(self) -> Lease:
        """Another lease on the same block."""
        assert self.block is not None, "leased again after its release"
        return self.block.lease(caller())

    def release(self) -> None:
        """Twice is fine."""
        block, self.block = self.block, None
        if block is not None:
            block._release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if self.block is not None:
            self.block._pool.forgotten.append((self.release, "a lease", self.block.size, self.origin))


class Pool:
    """`capacity` bytes of host memory in page-aligned pieces. Allocation is O(log n) and scans nothing."""

    def __init__(self, capacity: int, runtime: Runtime) -> None:
        self.capacity = capacity // PAGE_BYTES * PAGE_BYTES
        self.pages = Pages(self.capacity, runtime)
        self.now = runtime.now
        self._runtime = runtime
        # Held for a few dictionary operations, never across I/O, a copy or a call to anybody else.
        self.lock = runtime.lock()
        self.leaked = 0
        """How many leases, reservations and blocks were forgotten and not given back."""
        # What `__del__` wants done. The garbage collector may call it on a thread that holds the lock, so it must not
        # take one: the next `reserve` does the work.
        self.forgotten: deque[tuple[Callable[[], None], str, int, Origin]] = deque()
        self.times_freed = 0
        """Grows whenever something is given back, or is in use no more."""
        self._freed = runtime.condition()
        self._waiting = 0
        self._extents = Extents(self.capacity)
        self._gone = False
        opened(self)

    def inherited(self, pid: int) -> None:
        """In a forked child, where the memory reads as zeros: there is no room, and nothing comes back."""
        self._gone = True
        self.lock, self._freed = self._runtime.lock(), self._runtime.condition()
        self._extents = Extents(0)
        self.forgotten.clear()

    @property
    def used_bytes(self) -> int:
        self._collect()
        return self.capacity - self._extents.free_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in no use, not all of them beside each other."""
        return self._extents.free_bytes

    def reserve(self, nbytes: int, *, deadline: float = math.inf) -> Reservation | None:
        """Memory for `nbytes` bytes, or None if there is no free extent that long."""
        self._collect()
        size = pages_of(nbytes)
        with self.lock:
            start = self._extents.take(size)
        if start is None:
            return None
        self.pages.reach(start + size)
        return Reservation(self, start, size, nbytes, deadline, caller())

    def wait_for_room(self, until: float, freed: int) -> None:
        """Block until `times_freed` is no longer `freed`, a moment has passed, or `until`."""
        with self._freed:
            self._waiting += 1
            left = until - self.now()
            if left > 0 and self.times_freed == freed:
                self._freed.wait(min(left, 0.05))  # what was forgotten tells nobody
            self._waiting -= 1

    def tensor(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        return self.pages.bytes[start : start + nbytes].view(dtype).view(tuple(shape))

    def free(self, start: int, size: int) -> None:
        if self._gone:
            return
        with self.lock:
            self._extents.give(start, size)
        self.tell()

    def tell(self) -> None:
        """Wake up whoever waits for room."""
        self.times_freed += 1
        # Whoever begins to wait from here on sees the new number first.
        if self._waiting:
            with self._freed:
                self._freed.notify_all()

    def _collect(self) -> None:
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
        """Stop the background thread. Memory still in use stays valid."""
        if self._gone:
            return
        self._collect()
        self.pages.close()
