"""Addresses of buffers, and joining adjacent ones: O_DIRECT depends on both."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from kvloom import native


class Extent(NamedTuple):
    """A run of bytes. Valid only as long as the buffers it was made of."""

    address: int
    view: memoryview


def coalesce(views: Sequence[memoryview]) -> list[Extent]:
    """The same bytes in the same order in as few runs as possible: views that touch in memory become one."""
    runs: list[Extent] = []
    for view in views:
        start = native.pointer(view)
        if runs and runs[-1].address + len(runs[-1].view) == start:
            first, size = runs[-1].address, len(runs[-1].view) + len(view)
            runs[-1] = Extent(first, memoryview((ctypes.c_char * size).from_address(first)).cast("B"))
        else:
            runs.append(Extent(start, view))
    return runs
