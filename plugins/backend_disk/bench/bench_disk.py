"""Speed of the disk backend's reads and writes, beside plain `open().write()` and `open().readinto()`.

    python bench_disk.py DIRECTORY

Every contender writes blobs under new names (a header page and 64 buffers each), reads them while the page cache may
hold them, then again after it was told to forget them. Contenders take turns, first a different one each time, and
nobody starts before the last one's data is on the disk. Medians, in GB/s.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kvloom_backend_disk.backend import DiskBackend

HEADER_BYTES = 4096
BUFFERS_PER_BLOB = 64
PHASES = ("written", "warm", "cold")


class Contender(Protocol):
    def put(self, key: str, blob: Sequence[memoryview]) -> None: ...

    def fetch(self, key: str, into: memoryview) -> None: ...


class Plain:
    """The limit: no atomic publishing, no choice, one buffer."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, key: str, blob: Sequence[memoryview]) -> None:
        with open(self._directory / key.replace("/", "_"), "wb", buffering=0) as file:
            for part in (blob[0], blob[1].obj):
                file.write(part)

    def fetch(self, key: str, into: memoryview) -> None:
        with open(self._directory / key.replace("/", "_"), "rb", buffering=0) as file:
            assert file.readinto(into) == len(into)


class Backend:
    def __init__(self, directory: Path, direct: Any) -> None:
        self._backend = DiskBackend(DiskBackend.Config(path=directory, direct=direct))

    def put(self, key: str, blob: Sequence[memoryview]) -> None:
        self._backend.put(key, blob)

    def fetch(self, key: str, into: memoryview) -> None:
        assert self._backend.get_into(key, Into(into))


class Into:
    """A sink over given memory."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def reserve(self, num_bytes: int) -> memoryview:
        return self._memory[:num_bytes]

    def filled(self, num_bytes: int) -> None:
        pass


def blobs(count: int, blob_bytes: int) -> list[list[memoryview]]:
    step = blob_bytes // BUFFERS_PER_BLOB
    result = []
    for _ in range(count):
        header, payload = mmap.mmap(-1, HEADER_BYTES), mmap.mmap(-1, blob_bytes)
        payload[:] = os.urandom(1 << 20) * (blob_bytes >> 20)
        view = memoryview(payload)
        result.append([memoryview(header), *(view[at : at + step] for at in range(0, blob_bytes, step))])
    return result


def forget(directory: Path) -> None:
    """Make the page cache drop the directory's files."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def gigabytes_per_second(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], None]], num_bytes: int) -> float:
    start = time.perf_counter()
    for future in [pool.submit(call) for call in calls]:
        future.result()
    return num_bytes / (time.perf_counter() - start) / 1e9


def turn(
    contender: Contender, directory: Path, source: list[list[memoryview]], targets: list[memoryview], pool: Any
) -> list[float]:
    keys = [f"{'0' * 32}/-/{i}-{i:064x}" for i in range(len(source))]
    size = sum(map(len, targets))
    os.sync()
    rates = [
        gigabytes_per_second(pool, [partial(contender.put, *item) for item in zip(keys, source, strict=True)], size)
    ]
    fetch = [partial(contender.fetch, *item) for item in zip(keys, targets, strict=True)]
    rates.append(gigabytes_per_second(pool, fetch, size))
    forget(directory)
    rates.append(gigabytes_per_second(pool, fetch, size))
    for target, blob in zip(targets, source, strict=True):
        assert target[HEADER_BYTES:] == blob[1].obj, "what was read is not what was written"
        target[:] = bytes(len(target))
    for path in directory.rglob("*-*"):
        if path.is_file():
            path.unlink()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="on the disk to measure; needs room for one round of blobs")
    parser.add_argument("--blobs", type=int, default=16)
    parser.add_argument("--mib", type=int, default=32, help="per blob")
    parser.add_argument("--threads", type=int, default=DiskBackend.threads)
    parser.add_argument("--reps", type=int, default=5)
    args = parser.parse_args()

    source = blobs(args.blobs, args.mib << 20)
    memory = memoryview(mmap.mmap(-1, args.blobs * ((args.mib << 20) + HEADER_BYTES)))
    memory[:] = bytes(len(memory))
    step = len(memory) // args.blobs
    targets = [memory[at : at + step] for at in range(0, len(memory), step)]
    root = Path(tempfile.mkdtemp(dir=args.directory))
    contenders: dict[str, Contender] = {}
    for name in ("plain", "auto", "never", "always"):
        (root / name).mkdir()
        contenders[name] = Plain(root / name) if name == "plain" else Backend(root / name, name)
    results: dict[str, list[list[float]]] = {name: [] for name in contenders}
    try:
        with ThreadPoolExecutor(args.threads) as pool:
            names = list(contenders)
            for rep in range(args.reps):
                for name in names[rep % len(names) :] + names[: rep % len(names)]:
                    results[name].append(turn(contenders[name], root / name, source, targets, pool))
    finally:
        shutil.rmtree(root)
    print(
        f"{args.blobs} blobs of {args.mib} MiB, {args.threads} threads, medians of {args.reps} (lowest-highest), GB/s"
    )
    print(f"{'':16}" + "".join(f"{phase:>22}" for phase in PHASES))
    for name, rates in results.items():
        cells = [f"{statistics.median(x):.2f} ({min(x):.2f}-{max(x):.2f})" for x in zip(*rates, strict=True)]
        print(f"{name if name == 'plain' else f'direct: {name}':16}" + "".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
