"""A window of files in the page cache: writes that keep up with the disk, and what is used again is still in memory.

Left alone, the kernel collects writes until it has too many, and then finds room for more slowly. Here a file begins to
be written to the disk when its blob is complete, and later writers wait for it. The files that were written or read
last stay in the page cache; the pages of others leave it, and their memory is used again.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache

from kvloom_backend_disk import pagecache

UNWRITTEN_BYTES = 256 << 20
"""Maximum size of the files of a tier that are in the page cache and on their way to the disk."""

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4

_everybody: weakref.WeakSet[Window] = weakref.WeakSet()


class Window:
    """The files that were used last. They are known by their paths: between calls no descriptor is open.

    Nothing here fails. A file that was deleted has no turn to wait for; one that was replaced has that of the new one.
    """

    def __init__(self, kept_bytes: int) -> None:
        """kept_bytes: maximum size of the files that were used last and stay in the page cache."""
        self._kept_bytes = kept_bytes
        self._begin()
        _everybody.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._unwritten = _Line(UNWRITTEN_BYTES)
        self._kept = _Line(self._kept_bytes)

    def begin(self, fd: int) -> None:
        """Begin to write the content of the file to the disk."""
        _sync_file_range()(fd, 0, 0, _WRITE)

    def written(self, path: str, num_bytes: int) -> None:
        """A file that was begun is at this path now. Waits for others, if there is too much to write."""
        with self._lock:
            to_write, to_drop = self._unwritten.add(path, num_bytes), self._kept.add(path, num_bytes)
        for old in to_write:
            self._wait_for(old)
        for old in to_drop:
            self._drop(old)

    def read(self, files: Sequence[tuple[str, int]]) -> None:
        """Note that files were read, each with its size, the last one last."""
        with self._lock:
            to_drop = [old for path, num_bytes in files for old in self._kept.add(path, num_bytes)]
        for old in to_drop:
            self._drop(old)

    def _wait_for(self, path: str) -> None:
        _opened(path, lambda fd: _sync_file_range()(fd, 0, 0, _WAIT_BEFORE | _WRITE | _WAIT_AFTER))

    def _drop(self, path: str) -> None:
        _opened(path, lambda fd: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))


class _Line:
    """Files in the order in which they were used last, up to a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._files: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0

    def add(self, path: str, num_bytes: int) -> list[str]:
        """Returns those that are beyond the number of bytes now, the oldest first."""
        self._bytes += num_bytes - self._files.pop(path, 0)
        self._files[path] = num_bytes
        beyond = []
        while self._bytes > self._most_bytes and len(self._files) > 1:
            old, its_bytes = self._files.popitem(last=False)
            self._bytes -= its_bytes
            beyond.append(old)
        return beyond


def works(fd: int) -> bool:
    """Return whether writes can be followed where this file is: writes a page to it, and asks what becomes of it.

    Not on a system without `sync_file_range` or `cachestat` (before Linux 6.5), and not on file systems that keep the
    content of their files in those of another, such as overlayfs: there the kernel takes the calls and does nothing.
    """
    follow = _sync_file_range()
    if follow is None or not hasattr(os, "posix_fadvise"):
        return False
    written = os.pwrite(fd, bytes(pagecache.PAGE_BYTES), 0)
    if follow(fd, 0, 0, _WAIT_BEFORE | _WRITE | _WAIT_AFTER):
        return False
    return written > 0 and pagecache.is_clean(fd, written)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def _opened(path: str, use: Callable[[int], object]) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        use(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


def _after_fork_in_child() -> None:
    for one in tuple(_everybody):
        one._begin()  # another thread may have held its lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
