"""The backend meets the requirements of storage backends on moto's S3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvloom import StorageBackend
from kvloom_backend_fsspec.testing import MotoServer
from kvloom_testkit import BackendConformance


class TestMoto(BackendConformance):
    @pytest.fixture(scope="class")
    def bucket(self, moto: MotoServer, new_bucket: Callable[..., str]) -> str:
        return new_bucket(moto)

    @pytest.fixture
    def make(self, moto: MotoServer, bucket: str, s3: Any) -> Callable[[], StorageBackend]:
        return lambda: s3(moto, bucket)

    @pytest.fixture
    def raw(self, moto: MotoServer, bucket: str, raw_of: Any) -> Any:
        return raw_of(moto, bucket, "kv")
