"""Ways to read blobs that are not in the page cache: past it, and into it with several kinds of advice to the kernel.

`direct` reads with O_DIRECT. The others read into the page cache, and drop from it all but the `--window` MiB that were
read last; that window is full before the time is taken, as it is in a process that goes on. `sequential` tells the
kernel that a file is read from start to end, `willneed` asks for all of it at once before it is read, and `ahead` for
`--ahead` MiB more at each step. All files are written, synced and dropped first, and checked to be out of the cache.

    python plugins/backend_disk/bench/bench_cold_reads.py --dir /some/disk --mib 2048
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MODES = ("direct", "cached", "sequential", "willneed", "ahead")
CACHED_STEP, DIRECT_STEP = 512 << 10, 1 << 20
RWF_NOWAIT = 8


class Reader:
    """Reads files in one mode, with a window of files that stay in the page cache."""

    def __init__(self, mode: str, size: int, window: int, ahead: int) -> None:
        self._mode, self._size, self._ahead = mode, size, ahead
        self.most = max(1, window // size)
        self._kept: deque[Path] = deque()
        self._lock = threading.Lock()
        self._memory = threading.local()

    def read(self, path: Path) -> None:
        into = getattr(self._memory, "into", None)
        if into is None:
            into = self._memory.into = memoryview(mmap.mmap(-1, self._size))
            into[:] = bytes(self._size)
        direct = self._mode == "direct"
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        if self._mode in ("sequential", "ahead"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        if self._mode == "willneed":
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        done, asked, step = 0, 0, DIRECT_STEP if direct else CACHED_STEP
        while done < self._size:
            while self._mode == "ahead" and asked < min(self._size, done + self._ahead):
                os.posix_fadvise(fd, asked, self._ahead // 2, os.POSIX_FADV_WILLNEED)
                asked += self._ahead // 2
            done += os.preadv(fd, [into[done : done + step]], done)
        os.close(fd)
        if not direct:
            with self._lock:
                self._kept.append(path)
                old = self._kept.popleft() if len(self._kept) > self.most else None
            if old is not None:
                drop(old)


def drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def is_cold(path: Path, size: int) -> bool:
    """Return whether neither the first, the middle nor the last page is in the page cache."""
    with path.open("rb", buffering=0) as file:
        for at in (0, size // 2, size - mmap.PAGESIZE):
            try:
                os.preadv(file.fileno(), [bytearray(1)], at, RWF_NOWAIT)
            except BlockingIOError:
                continue
            return False
    return True


def measure(mode: str, paths: list[Path], size: int, threads: int, window: int, ahead: int) -> tuple[float, float]:
    """GB/s, and seconds in the kernel for each GB."""
    for path in paths:
        drop(path)
    warm = sum(not is_cold(path, size) for path in paths)
    if warm:
        print(f"{warm} of {len(paths)} files are still in the page cache", flush=True)
    for path in paths:
        drop(path)  # the check above has made the kernel read ahead
    reader = Reader(mode, size, window, ahead)
    for path in paths[-reader.most :]:
        reader.read(path)  # dropped again before their turn comes
    before, began = os.times(), time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(reader.read, paths))
    seconds, after = time.perf_counter() - began, os.times()
    gigabytes = len(paths) * size / 1e9
    return gigabytes / seconds, (after.system - before.system) / gigabytes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 8192, 32768], help="of a blob, in KiB")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--mib", type=int, default=1024, help="of all files of a size")
    parser.add_argument("--window", type=int, default=256, help="MiB that stay in the page cache")
    parser.add_argument("--ahead", type=int, default=4, help="MiB that `ahead` asks for")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if 2 * asked.window > asked.mib:
        parser.error(f"--mib: less than two windows of {asked.window} MiB")
    for size in [kib << 10 for kib in asked.sizes]:
        with tempfile.TemporaryDirectory(dir=asked.dir) as folder:
            paths = [Path(folder) / str(number) for number in range((asked.mib << 20) // size)]
            block = os.urandom(1 << 20) * -(-size >> 20)
            for path in paths:
                path.write_bytes(block[:size])
            os.sync()
            for threads in asked.threads:
                found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in asked.modes}
                for _ in range(asked.rounds):
                    for mode in asked.modes:
                        found[mode].append(measure(mode, paths, size, threads, asked.window << 20, asked.ahead << 20))
                for mode, results in found.items():
                    speeds = sorted(speed for speed, _ in results)
                    kernel = statistics.median(seconds for _, seconds in results)
                    print(
                        f"{size >> 10:6} KiB, {threads} threads, {mode:10} {statistics.median(speeds):5.2f} GB/s "
                        f"({speeds[0]:.2f} to {speeds[-1]:.2f}), {kernel:.2f} s in the kernel for each GB",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
