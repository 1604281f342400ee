from __future__ import annotations

import logging
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvloom_backend_disk import native_reads
from kvloom_backend_disk.backend import DiskBackend

Open = Callable[..., DiskBackend]


@pytest.fixture(scope="session")
def open_backend() -> Open:
    def open_backend(path: Path, direct: Any = "auto", page_cache: Any = "1GiB") -> DiskBackend:
        return DiskBackend(DiskBackend.Config(path=path, direct=direct, page_cache=page_cache))

    return open_backend


class Target:
    """A sink over page-aligned memory, `shift` bytes off, that checks how it is used."""

    def __init__(self, expected: bytes | None = None, shift: int = 0) -> None:
        self.expected = expected
        self.shift = shift
        self.steps: list[int] = []
        self.view = memoryview(b"")

    def reserve(self, num_bytes: int) -> memoryview:
        room = memoryview(mmap.mmap(-1, num_bytes + self.shift + mmap.PAGESIZE))[self.shift :]
        self.view = room[:num_bytes]
        return room

    def filled(self, num_bytes: int) -> None:
        if self.expected is not None:
            start = self.steps[-1] if self.steps else 0
            assert self.view[start:num_bytes] == self.expected[start:num_bytes], "reported before it had arrived"
        self.steps.append(num_bytes)


@pytest.fixture(scope="session")
def target() -> type[Target]:
    return Target


@pytest.fixture(scope="session")
def drop_from_cache() -> Callable[[Path], None]:
    def drop_from_cache(path: Path) -> None:
        for file in path.rglob("*"):
            if file.is_file():
                fd = os.open(file, os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

    return drop_from_cache


@pytest.fixture
def direct_path(tmp_path: Path, open_backend: Open) -> Path:
    """A directory in which O_DIRECT works."""
    try:
        open_backend(tmp_path, "always")
    except ValueError as error:
        pytest.skip(str(error))
    return tmp_path


@pytest.fixture
def infos(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "kvloom.backend_disk")
    return caplog


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By native code, or without it."""
    if request.param == "python":
        monkeypatch.setattr(native_reads, "available", lambda: False)
    elif shutil.which("c++") is None:
        pytest.skip("kvloom-native has no library: there is no C++ compiler that could have built it")
    else:
        assert native_reads.available()
    return str(request.param)
