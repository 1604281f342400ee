"""The memory behind the pool: one anonymous mapping whose pages are made present a little ahead of their use."""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys

import torch

from kvloom.runtime import Runtime

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: faults pages in without writing to them
_STEP_BYTES = 2 << 20  # short calls: while one runs, no thread of the process can map or unmap memory
_AHEAD_BYTES = 128 << 20


class Pages:
    """`size` bytes of page-aligned, initially zero host memory.

    Opening costs nothing whatever the size: a background thread of low priority keeps the next 128 MiB beyond the
    highest address in use present, so that a store copies instead of faulting. Writing to memory that is still absent
    is merely slower.
    """

    def __init__(self, size: int, runtime: Runtime) -> None:
        self.size = size
        lazily = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
        self._map = mmap.mmap(-1, max(size, PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | lazily)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.view = memoryview(self._map)
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._wake = runtime.condition()
        self._wanted = 0
        self._present = 0
        self._closed = False
        if self._libc is not None and size:
            self.reach(0)
            runtime.spawn(self._populate, name="kvloom-pages", low_priority=True)

    def reach(self, end: int) -> None:
        """Say that addresses up to `end` are in use."""
        wanted = min(self.size, end + _AHEAD_BYTES)
        if wanted - self._wanted >= _STEP_BYTES or wanted == self.size != self._wanted:
            with self._wake:
                self._wanted = max(self._wanted, wanted)
                self._wake.notify_all()

    @property
    def settled(self) -> bool:
        """Everything wanted so far is present, or never will be ahead of its use."""
        return self._libc is None or self._present >= self._wanted

    def close(self) -> None:
        """Stop the background thread. The memory goes when nobody refers to it any more."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def _populate(self) -> None:
        assert self._libc is not None
        base = self.bytes.data_ptr()
        while True:
            with self._wake:
                while self._present >= self._wanted and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                start = self._present
                end = min(self._wanted, start + _STEP_BYTES)
            if self._libc.madvise(ctypes.c_void_p(base + start), ctypes.c_size_t(end - start), _POPULATE_WRITE):
                log.debug("pages are not made present ahead of use: errno %d", ctypes.get_errno())
                self._present = self.size
                return
            self._present = end
