"""The memory behind the pool: one anonymous mapping whose pages are made present a little ahead of their use."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import sys
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import torch

from kvloom.forks import was_forked
from kvloom.memory.pinning import Pinner
from kvloom.numa import bind
from kvloom.runtime import Runtime, Thread

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, Linux 4.14
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: faults pages in without writing to them
_STEP_BYTES = 2 << 20  # short calls: while one runs, no thread of the process can map or unmap memory
_AHEAD_BYTES = 128 << 20
SLAB_BYTES = 256 << 20
"""The least that is pinned at a time."""
_PIECES = 32
"""Minimum number of the largest pieces in a slab: the rest of its last part is lost."""


class Pages:
    """`size` bytes of page-aligned, initially zero host memory.

    Opening costs nothing whatever the size: a background thread of low priority keeps the next 128 MiB beyond the
    highest address in use present, so that a store copies instead of faulting. Writing to memory that is still absent
    is merely slower. With a pinner, the thread also pins slab after slab once its pages are present. A copy must not
    span two slabs, since they are registered one by one.
    """

    def __init__(
        self, size: int, runtime: Runtime, *, pinner: Pinner | None = None, eager: bool = False, piece_bytes: int = 0
    ) -> None:
        """eager: all of it is wanted as soon as it can be pinned. piece_bytes: of the largest copy."""
        self.size = size
        self._runtime = runtime
        settle_threads()
        self._map = _mapping(size)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.view = memoryview(self._map)
        self._eager = eager
        self.slab_ends = _slab_ends(size, piece_bytes) if pinner is not None else (size,)
        """The ends of the slabs."""
        self.pinned_bytes = 0
        self._pinner = pinner
        self._pinning = False
        self._at_home: bool | None = None
        """It is on the NUMA node of the device that it is pinned for. None: not tried."""
        self._pinned: list[Callable[[], None]] = []
        """For each slab that is pinned, from the first on, how it is unpinned."""
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._wake = runtime.condition()
        self._wanted = 0
        self._present = 0
        self._closed = False
        self._thread: Thread | None = None
        if self._libc is not None and size:
            self.reach(0)
            self._thread = runtime.spawn(self._work, name="kvloom-pages", low_priority=True)

    def reach(self, end: int) -> None:
        """Say that addresses up to `end` are in use."""
        wanted = min(self.size, end + _AHEAD_BYTES)
        begins = self._pinner is not None and not self._pinning and self._pinner.ready()
        if begins or wanted - self._wanted >= _STEP_BYTES or wanted == self.size != self._wanted:
            with self._wake:
                self._pinning = self._pinning or begins
                wanted = max(wanted, self._wanted)
                if self._pinning and self._eager:
                    wanted = self.size
                if self._pinning:  # whole slabs
                    wanted = self.slab_ends[bisect_left(self.slab_ends, wanted)]
                self._wanted = wanted
                self._wake.notify_all()

    @property
    def settled(self) -> bool:
        """Everything wanted so far is present (and pinned), or never will be ahead of its use."""
        return self._libc is None or (self._present >= self._wanted and not self._to_pin())

    def close(self) -> None:
        """Stop the background thread and unpin. The memory is freed with the last reference to it."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(10.0)

    def give_back(self) -> None:
        """Return the memory to the system once it is closed, if nobody uses it: it reads as zeros from now on."""
        if self._thread is None or not self._thread.is_alive():
            with contextlib.suppress(OSError, ValueError, AttributeError):
                self._map.madvise(mmap.MADV_DONTNEED)

    def _to_pin(self) -> bool:
        """The next slab is present and can be pinned."""
        count = len(self._pinned)
        return self._pinning and count < len(self.slab_ends) and self.slab_ends[count] <= self._present

    def _work(self) -> None:
        while True:
            with self._wake:
                while self._present >= self._wanted and not self._to_pin() and not self._closed:
                    self._wake.wait()
                if self._closed:
                    break
            if self._pinning and self._at_home is None:
                self._at_home = self._move_home()
            if self._to_pin():
                self._pin_next()
            else:
                self._populate_next()
        for unpin in reversed(self._pinned):
            unpin()
        self.pinned_bytes = 0

    def _move_home(self) -> bool:
        assert self._pinner is not None
        node = self._pinner.node()
        if node is None:
            return False
        self._runtime.run_on(node.cpus)
        return bind(node, self.bytes.data_ptr(), self.size)

    def _populate_next(self) -> None:
        assert self._libc is not None
        start, end = self._present, min(self._wanted, self._present + _STEP_BYTES)
        address = ctypes.c_void_p(self.bytes.data_ptr() + start)
        if self._libc.madvise(address, ctypes.c_size_t(end - start), _POPULATE_WRITE):
            log.debug("pages are not made present ahead of use: errno %d", ctypes.get_errno())
            end = self.size
        self._present = end

    def _pin_next(self) -> None:
        assert self._pinner is not None
        end = self.slab_ends[len(self._pinned)]
        start = self.pinned_bytes
        address = self.bytes.data_ptr() + start
        if self._pinner.register(address, end - start):
            self._pinned.append(partial(self._pinner.unregister, address))
            self.pinned_bytes = end
        else:
            self._pinning, self._pinner = False, None
            log.warning(
                "only %d of %d bytes of the pool could be pinned: copies to and from the GPU are slower",
                start,
                self.size,
            )


def _mapping(size: int) -> mmap.mmap:
    lazily = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    mapping = mmap.mmap(-1, max(size, PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | lazily)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    if sys.platform == "linux":
        # A child has no use for KV, and copying pages that both might write would slow the parent down.
        with contextlib.suppress(OSError):
            mapping.madvise(_WIPE_ON_FORK)
    return mapping


def _slab_ends(size: int, piece_bytes: int) -> tuple[int, ...]:
    count = max(1, size // max(SLAB_BYTES, _PIECES * piece_bytes))
    step = size // count // PAGE_BYTES * PAGE_BYTES
    return (*(step * number for number in range(1, count)), size)


def settle_threads() -> None:
    """Have torch work on one thread in a forked process: for the thread that calls this, and those begun later."""
    if not was_forked():
        return
    threads = torch.get_num_threads()
    # OpenMP waits for the threads of the parent, which are not here, for ever; and torch makes its own pool anew at the
    # first use, a step that two threads must not race.
    torch.set_num_threads(1)
    if threads > 1:
        log.warning("torch copies on one thread, because this process was forked; start it with spawn for more")
