"""The backend meets the requirements of storage backends on a real S3 server: Ceph's gateway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvloom import StorageBackend
from kvloom_backend_fsspec.testing import CephRGW
from kvloom_testkit import BackendConformance


class TestRGW(BackendConformance):
    @pytest.fixture(scope="class")
    def bucket(self, rgw: CephRGW, new_bucket: Callable[..., str]) -> str:
        return new_bucket(rgw)

    @pytest.fixture
    def make(self, rgw: CephRGW, bucket: str, s3: Any) -> Callable[[], StorageBackend]:
        return lambda: s3(rgw, bucket)

    @pytest.fixture
    def raw(self, rgw: CephRGW, bucket: str, raw_of: Any) -> Any:
        return raw_of(rgw, bucket, "kv")
