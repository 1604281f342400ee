"""What the kernel's page cache holds and how much more it takes in without making writers wait."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

_REFRESH_SECONDS = 0.05
_VMSTAT = Path("/proc/vmstat")


class DirtyRoom:
    """Says how many bytes can be written into the page cache before the kernel slows writers down to the device.

    That is half-way between the two thresholds of dirty memory. Where the kernel does not publish them there is room.
    """

    def __init__(self) -> None:
        self._bytes = 0.0
        self._until = 0.0

    def take(self, num_bytes: int) -> bool:
        """Whether there is room for so much. Racing threads may overdraw it by a blob each, which does no harm."""
        now = time.monotonic()
        if now >= self._until:
            self._bytes = _dirty_room_bytes()
            self._until = now + _REFRESH_SECONDS
        self._bytes -= num_bytes
        return self._bytes >= 0


def _dirty_room_bytes() -> float:
    try:
        lines = _VMSTAT.read_bytes().splitlines()
        pages = {name: int(count) for name, _, count in (line.partition(b" ") for line in lines)}
        slow = (pages[b"nr_dirty_background_threshold"] + pages[b"nr_dirty_threshold"]) / 2
        return (slow - pages[b"nr_dirty"] - pages[b"nr_writeback"]) * mmap.PAGESIZE
    except (OSError, KeyError, ValueError):
        return float("inf")


def is_cached(fd: int, offset: int, num_bytes: int) -> bool:
    """Whether the page cache seems to hold this part of the file: it holds a page at each quarter of it.

    Looking at an uncached page makes the kernel fetch that one page. So a part that is read a second time before these
    pages are dropped counts as cached, is read through the page cache and stays in it from then on.
    """
    nowait = getattr(os, "RWF_NOWAIT", 0)
    if not nowait:
        return True
    page = bytearray(1)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # else the look starts reading ahead
    try:
        return all(os.preadv(fd, [page], offset + num_bytes * part // 4, nowait) for part in (1, 3))
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system that cannot answer without waiting
    finally:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
