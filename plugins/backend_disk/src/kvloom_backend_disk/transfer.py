"""Moves bytes between memory and open files, through the page cache or past it (O_DIRECT), whichever is faster.

Reading from the page cache is several times faster than from any disk. With a `window`, everything is read and written
through it, and what was not used lately is dropped from it. Where that is not possible, large blobs are written past
the cache, and read past it unless they are in it.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from kvloom import BackendError, Buffers, native
from kvloom_backend_disk.extents import Extent, coalesce
from kvloom_backend_disk.pagecache import is_cached
from kvloom_backend_disk.window import Window

Mode = Literal["auto", "always", "never"]

BLOCK_BYTES = 4096
"""O_DIRECT wants addresses, offsets and lengths that are multiples of this."""
CACHED_STEP_BYTES = 512 << 10
"""Bytes read from the page cache between two reports, so that they are verified while in the processor's cache."""
DIRECT_STEP_BYTES = 1 << 20
"""Bytes of one read past the page cache: enough to keep a disk busy."""
SMALL_BYTES = 128 << 10
"""Below this, choosing costs more than it brings: `auto` uses the page cache."""
SMALL_BLOB_BYTES = 1 << 20
"""Blobs up to this are read through the page cache: as fast as past it, and the next time it holds them."""

_IOV_MAX = os.sysconf("SC_IOV_MAX")


class Transfer:
    """Reads and writes as `mode` says."""

    def __init__(self, mode: Mode, *, tried: bool = True, window: Window | None = None) -> None:
        """tried: O_DIRECT is known to work, if `mode` wants it; else it is found out when it is first read with.

        window: of files in the page cache, which `auto` reads and writes through; None in other modes.
        """
        self.mode = mode
        self.tried = tried
        self.window = window

    def write(self, fd: int, blob: Buffers) -> None:
        """Make the blob the content of the file `fd`, open at its start. Raises OSError, with part of it written."""
        views = [memoryview(buffer).cast("B") for buffer in blob if memoryview(buffer).nbytes]
        size = sum(map(len, views))
        if self.writes_directly(views):
            for direct, pieces in itertools.groupby(_pieces(coalesce(views)), key=lambda piece: piece[0]):
                _set_direct(fd, direct)
                _write_all(fd, [view for _, view in pieces])
        else:
            _write_all(fd, views)
            if self.window is not None and size >= SMALL_BYTES:
                self.window.begin(fd)
        if os.fstat(fd).st_size > size:
            os.ftruncate(fd, size)

    def written(self, path: str, blob: Buffers) -> None:
        """Note the path of what `write` wrote, and wait for the disk if too much is on its way there."""
        if self.window is not None and (size := _size(blob)) >= SMALL_BYTES:
            self.window.written(path, size)

    def were_read(self, files: Iterable[tuple[str, int]]) -> None:
        """Note files that were read, or parts of them: their paths and sizes in bytes, the last one last."""
        if self.window is not None:
            self.window.read([(path, num_bytes) for path, num_bytes in files if num_bytes >= SMALL_BYTES])

    def read(
        self, fd: int, offset: int, into: memoryview, filled: Callable[[int], object], *, blob_bytes: int
    ) -> None:  # fmt: skip
        """Fill `into` from `offset` of the file, telling `filled` again and again how many bytes have arrived.

        blob_bytes: how long the file is. Raises BackendError if it ends before.
        """
        size = len(into)
        direct_bytes = 0
        if not self.tried:
            self._try_direct(fd)
        if self._reads_directly(fd, offset, size, blob_bytes) and (native.pointer(into) | offset) % BLOCK_BYTES == 0:
            direct_bytes = size - size % BLOCK_BYTES
        elif self.window is not None and size >= SMALL_BYTES:
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_SEQUENTIAL)
        os.lseek(fd, offset, os.SEEK_SET)
        done = 0
        for direct, end, step in ((True, direct_bytes, DIRECT_STEP_BYTES), (False, size, CACHED_STEP_BYTES)):
            if done < end:
                _set_direct(fd, direct)
            while done < end:
                got = os.readv(fd, [into[done : min(done + step, end)]])
                if not got:
                    raise BackendError(f"the file ends after {offset + done} bytes, {size - done} too early")
                done += got
                filled(done)

    def _try_direct(self, fd: int) -> None:
        if self.mode != "never" and not _reads_past_the_cache(fd):
            self.mode = "never"
        self.tried = True

    def writes_directly(self, blob: Buffers) -> bool:
        """Return whether to write a blob past the page cache."""
        if self.mode != "auto":
            return self.mode == "always"
        return self.window is None and _size(blob) >= SMALL_BYTES

    def writes_over(self, blob: Buffers) -> bool:
        """Return whether to write a blob over another one's file takes less time than to make a new one."""
        return self.mode == "always" or (self.mode == "auto" and _size(blob) >= SMALL_BYTES)

    def _reads_directly(self, fd: int, offset: int, size: int, blob_bytes: int) -> bool:
        if self.mode != "auto":
            return self.mode == "always"
        large = size >= SMALL_BYTES and blob_bytes > SMALL_BLOB_BYTES
        return self.window is None and large and not is_cached(fd, offset, size)


def _size(blob: Buffers) -> int:
    return sum(memoryview(buffer).nbytes for buffer in blob)


def probe_direct(fd: int) -> None:
    """Write a block to the file past the page cache and read it back. Raises OSError where that does not work."""
    if not hasattr(os, "O_DIRECT"):
        raise OSError("this system has no O_DIRECT")
    _set_direct(fd, True)
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        block[:] = written = os.urandom(BLOCK_BYTES)
        os.write(fd, block)
        block[:] = bytes(BLOCK_BYTES)
        os.lseek(fd, 0, os.SEEK_SET)
        os.readv(fd, [block])
        if block[:] != written:
            raise OSError("O_DIRECT read other bytes than it wrote")
    _set_direct(fd, False)


def _reads_past_the_cache(fd: int) -> bool:
    try:
        _set_direct(fd, True)
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            os.lseek(fd, 0, os.SEEK_SET)
            os.readv(fd, [block])
        return True
    except OSError:
        return False
    finally:
        _set_direct(fd, False)


def _set_direct(fd: int, direct: bool) -> None:
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if bool(flags & flag) != direct:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags ^ flag)


def _pieces(runs: Sequence[Extent]) -> Iterator[tuple[bool, memoryview]]:
    """Cut runs into pieces that O_DIRECT takes (True) and pieces that it does not: odd places, the odd tail."""
    offset = 0
    for start, view in runs:
        cut = len(view) - len(view) % BLOCK_BYTES if (start | offset) % BLOCK_BYTES == 0 else 0
        for direct, piece in ((True, view[:cut]), (False, view[cut:])):
            if len(piece):
                yield direct, piece
        offset += len(view)


def _write_all(fd: int, views: list[memoryview]) -> None:
    first = 0
    while first < len(views):
        written = os.writev(fd, views[first : first + _IOV_MAX])
        while first < len(views) and written >= len(views[first]):
            written -= len(views[first])
            first += 1
        if written:
            views[first] = views[first][written:]
