"""Ways to write blobs of 32 MiB that are read again soon: past the page cache, into it, and into it with write-behind.

`behind` starts to write a file to the disk once it is in the cache, and waits for the one `--bound` files before it.
`window` also drops files from the cache once `--window` others were written. Two threads write, as those of a tier do.

    python plugins/backend_disk/bench/bench_write_behind.py --dir /some/disk --files 16 256 1000
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOB_BYTES = 32 << 20
WAIT_BEFORE, WRITE, WAIT_AFTER = 1, 2, 4
MODES = ("direct", "cached", "behind", "window")

_sync_file_range = ctypes.CDLL(None, use_errno=True).sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class Writer:
    """Writes files in one mode."""

    def __init__(self, mode: str, folder: Path, bound: int, window: int) -> None:
        self._mode, self._folder, self._bound, self._window = mode, folder, bound, window
        self._blob = memoryview(mmap.mmap(-1, BLOB_BYTES))
        self._blob[:] = os.urandom(1 << 20) * (BLOB_BYTES >> 20)
        self._lock = threading.Lock()
        self._behind: deque[int] = deque()

    def path(self, number: int) -> Path:
        return self._folder / str(number)

    def write(self, number: int) -> None:
        direct = os.O_DIRECT if self._mode == "direct" else 0
        fd = os.open(self.path(number), os.O_WRONLY | os.O_CREAT | direct, 0o600)
        done = 0
        while done < BLOB_BYTES:
            done += os.write(fd, self._blob[done:])
        if self._mode in ("behind", "window"):
            _sync_file_range(fd, 0, BLOB_BYTES, WRITE)
            fd = self._after(fd)
        if fd >= 0:
            os.close(fd)
        if self._mode == "window" and number >= self._window:
            old = os.open(self.path(number - self._window), os.O_RDONLY)
            os.posix_fadvise(old, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(old)

    def _after(self, fd: int) -> int:
        """Hold a file whose writing was started; the one `bound` before it, once that is written, or -1."""
        with self._lock:
            self._behind.append(fd)
            if len(self._behind) <= self._bound:
                return -1
            old = self._behind.popleft()
        _sync_file_range(old, 0, BLOB_BYTES, WAIT_BEFORE | WRITE | WAIT_AFTER)
        return old

    def close(self) -> None:
        for fd in self._behind:
            os.close(fd)


def measure(mode: str, count: int, directory: Path | None, bound: int, window: int) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        writer = Writer(mode, Path(folder), bound, window)
        os.sync()
        before, began = os.times(), time.perf_counter()
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(writer.write, range(count)))
        os.sync()
        seconds, after = time.perf_counter() - began, os.times()
        writer.close()
        into = bytearray(BLOB_BYTES)
        last = range(max(0, count - 16), count)
        began = time.perf_counter()
        for number in last:
            with writer.path(number).open("rb", buffering=0) as file:
                file.readinto(into)
        again = len(last) * BLOB_BYTES / 1e9 / (time.perf_counter() - began)
        speed, system = count * BLOB_BYTES / 1e9 / seconds, after.system - before.system
        print(f"{mode:8} {count:5} files: on disk {speed:5.2f} GB/s, {system:5.1f} s in the kernel, again {again:5.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--files", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--bound", type=int, default=8)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    for _ in range(asked.rounds):
        for count in asked.files:
            for mode in MODES:
                measure(mode, count, asked.dir, asked.bound, asked.window)


if __name__ == "__main__":
    main()
