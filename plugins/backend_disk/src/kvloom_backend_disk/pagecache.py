"""Queries the kernel's page cache."""

from __future__ import annotations

import ctypes
import mmap
import sys

PAGE_BYTES = mmap.PAGESIZE
_CACHESTAT = 451  # Linux 6.5, the same number on every architecture


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


_syscall = ctypes.CDLL(None, use_errno=True).syscall if sys.platform == "linux" else None


def is_cached(fd: int, offset: int, num_bytes: int) -> bool:
    """Return whether the page cache holds this part of the file, or nearly all of it.

    Where the kernel cannot be asked (before Linux 6.5) the answer is no: a direct read of cached data is only slower,
    but a cached read of other data also costs memory.
    """
    if _syscall is None:
        return True  # no O_DIRECT there to choose instead
    found = _asked(fd, offset, num_bytes)
    return found is not None and bool(found.cached * PAGE_BYTES >= 0.9 * num_bytes)


def is_clean(fd: int, num_bytes: int) -> bool:
    """Return whether the page cache holds the beginning of the file, and the disk too. No if it cannot be asked."""
    found = _asked(fd, 0, num_bytes)
    return found is not None and found.cached * PAGE_BYTES >= num_bytes and not (found.dirty or found.writeback)


def _asked(fd: int, offset: int, num_bytes: int) -> _CacheStat | None:
    part, found = _Range(offset, num_bytes), _CacheStat()
    if _syscall is None or _syscall(_CACHESTAT, fd, ctypes.byref(part), ctypes.byref(found), 0):
        return None
    return found
