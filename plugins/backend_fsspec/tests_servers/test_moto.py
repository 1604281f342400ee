"""The backend meets the requirements of storage backends on moto's S3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvloom import StorageBackend, UnreadableBlobError
from kvloom_backend_fsspec.testing import MotoServer, s3_client
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


def test_an_object_that_a_rule_has_archived_is_no_failure_of_the_store(
    moto: MotoServer, new_bucket: Callable[..., str], s3: Any
) -> None:
    bucket = new_bucket(moto)
    backend, client = s3(moto, bucket), s3_client(moto.endpoint)
    backend.put("a/b", [b"blob"])
    (there,) = client.list_objects_v2(Bucket=bucket)["Contents"]
    client.put_object(Bucket=bucket, Key=there["Key"], Body=b"blob", StorageClass="GLACIER")
    for read in (lambda: backend.get("a/b"), lambda: backend.get_range("a/b", 0, memoryview(bytearray(2)))):
        with pytest.raises(UnreadableBlobError, match="archived"):
            read()
    backend.put("a/b", [b"blob"])
    assert backend.get("a/b") == b"blob"
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
