"""Memory that Mooncake may read and write directly, and copies where it may not."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvloom_backend_mooncake.codes import error

NEED_NOT_KNOW = frozenset({"tcp"})
"""Protocols that move any memory; the others need it registered."""

Regions = list[tuple[int, int]]
"""Addresses and lengths, bytes."""


def region(view: memoryview) -> tuple[int, int]:
    """Address and length in bytes of a contiguous buffer. Raises if it cannot be read as bytes."""
    array = np.frombuffer(view, dtype=np.uint8)
    return array.ctypes.data, array.nbytes


class Memories:
    """The memory that is registered with one client."""

    def __init__(self, protocol: str) -> None:
        self._any = protocol in NEED_NOT_KNOW
        self._known: list[tuple[int, int, memoryview]] = []

    def register(self, store: Any, memory: memoryview) -> None:
        """Make the whole of `memory` known, until `forget`. Raises MooncakeError."""
        view = memory.cast("B")
        start, size = region(view)
        if size == 0 or self._knows(start, size):
            return
        code = store.register_buffer(start, size)
        if code != 0:
            raise error(f"registering {size} bytes", code)
        self._known.append((start, size, view))

    def forget(self, store: Any) -> None:
        """Unregister all memory."""
        for start, _, view in self._known:
            store.unregister_buffer(start)
            view.release()
        self._known.clear()

    def _knows(self, start: int, size: int) -> bool:
        return any(first <= start and start + size <= first + length for first, length, _ in self._known)

    @contextlib.contextmanager
    def source(self, store: Any, views: Sequence[memoryview], *, known: bool = False) -> Iterator[Regions]:
        """The regions to read `views` from, copied if their memory is not registered. known: the call requires
        registered memory."""
        regions = [region(view) for view in views]
        if (self._any and not known) or all(self._knows(*one) for one in regions):
            yield regions
            return
        with _staged(store, sum(size for _, size in regions)) as staging:
            at = 0
            for view in views:
                staging[at : at + len(view)] = view
                at += len(view)
            yield [region(staging)]

    @contextlib.contextmanager
    def target(self, store: Any, view: memoryview, *, known: bool = False) -> Iterator[tuple[int, int]]:
        """The region to write to for `view`, copied at the end if its memory is not registered. known: see `source`."""
        if (self._any and not known) or self._knows(*region(view)):
            yield region(view)
            return
        with _staged(store, len(view)) as staging:
            yield region(staging)
            view[:] = staging


@contextlib.contextmanager
def _staged(store: Any, num_bytes: int) -> Iterator[memoryview]:
    """Memory of its own, known to the client for a moment. Raises MooncakeError."""
    room = mmap.mmap(-1, num_bytes)
    view = memoryview(room)
    start, size = region(view)
    code = store.register_buffer(start, size)
    if code != 0:
        raise error(f"registering {size} bytes", code)
    try:
        yield view
    finally:
        store.unregister_buffer(start)
