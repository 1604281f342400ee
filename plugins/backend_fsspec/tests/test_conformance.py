"""The backend meets the requirements of storage backends, on what needs no server."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from kvloom import StorageBackend
from kvloom_backend_fsspec.backend import FsspecBackend
from kvloom_testkit import BackendConformance


class TestFilesByObstore(BackendConformance):
    slow = (
        "B37",
    )  # the lease of a process that was killed is over after seconds; test_lease has what begins and ends it

    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], StorageBackend]:
        return lambda: FsspecBackend(FsspecBackend.Config(url=f"file://{tmp_path}/kv"))


@pytest.mark.slow  # a driver that nobody is given unasked
class TestFilesByFsspec(BackendConformance):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], StorageBackend]:
        return lambda: FsspecBackend(FsspecBackend.Config(url=f"file://{tmp_path}/kv", driver="fsspec"))


class TestMemory(BackendConformance):
    @pytest.fixture
    def make(self) -> Callable[[], StorageBackend]:
        url = f"memory://{uuid.uuid4().hex}"
        return lambda: FsspecBackend(FsspecBackend.Config(url=url))
