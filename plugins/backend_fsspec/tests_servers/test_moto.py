"""The backend meets the requirements of storage backends on moto's S3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvloom import StorageBackend
from kvloom_backend_fsspec.testing import MotoServer
from kvloom_testkit import BackendConformance
from kvloom_testkit.backends.doubles import put_all


def test_it_speaks_to_another_server_than_cephs(moto: MotoServer, new_bucket: Callable[..., str], s3: Any) -> None:
    bucket = new_bucket(moto)
    backend, blob = s3(moto, bucket), bytes(range(256)) * 80_000
    backend.check_writable()
    put_all(backend, [("a", [blob]), ("a/b", [b"blob"])])
    assert [backend.get(key) for key in ("a", "a/b", "b")] == [blob, b"blob", None]
    assert backend.create("new", [b"1"]) and not backend.create("new", [b"2"]) and backend.hold("evict")
    assert {(entry.key, entry.bytes) for entry in backend.scan()} == {("a", len(blob)), ("a/b", 4), ("new", 1)}
    assert backend.contains_many(["a/b", "a/c", "a"]) == [True, False, True]
    backend.delete_many(["a", "a/b", "nothing"])
    assert [entry.key for entry in backend.scan()] == ["new"]
    backend.close()


@pytest.mark.slow
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
