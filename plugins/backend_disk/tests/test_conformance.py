"""The disk backend meets the requirements of storage backends, however it moves bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvloom import StorageBackend
from kvloom_backend_disk.backend import DiskBackend
from kvloom_testkit import BackendConformance


class TestDisk(BackendConformance):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], StorageBackend]:
        return lambda: DiskBackend(DiskBackend.Config(path=tmp_path))


@pytest.mark.slow  # the same code but for how bytes move, which test_transfer and test_crash cover both ways
class TestDiskPastThePageCache(BackendConformance):
    @pytest.fixture
    def make(self, direct_path: Path) -> Callable[[], StorageBackend]:
        return lambda: DiskBackend(DiskBackend.Config(path=direct_path, direct="always"))
