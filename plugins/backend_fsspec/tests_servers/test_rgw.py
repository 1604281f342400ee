"""The backend meets the requirements of storage backends on a real S3 server: Ceph's gateway."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
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


def test_a_range_of_what_others_replace_meanwhile_is_read(
    rgw: CephRGW, new_bucket: Callable[..., str], s3: Any
) -> None:
    backend = s3(rgw, new_bucket(rgw), retries=0)
    with written_over(backend, "k", writers=2):
        for _ in range(200):  # one in five of them is answered with status 500
            assert backend.get_range("k", 7, memoryview(bytearray(100)))


@pytest.mark.parametrize("others", [0, 3])
def test_what_others_replace_meanwhile_is_deleted(
    rgw: CephRGW, new_bucket: Callable[..., str], s3: Any, others: int
) -> None:
    store = s3(rgw, new_bucket(rgw), retries=0)
    keys = [f"other-{i}" for i in range(others)]
    with written_over(store, "k", writers=4):
        for _ in range(60):  # two in five of them, asked for among others, are answered with UnknownError
            for key in keys:
                store.put(key, [b"old"])
            store.delete_many(["k", *keys])
            assert store.contains_many(keys) == [False] * others


@contextlib.contextmanager
def written_over(backend: StorageBackend, key: str, *, writers: int) -> Iterator[None]:
    """Meanwhile so many threads put a blob again and again."""
    done = threading.Event()

    def replace() -> None:
        while not done.is_set():
            backend.put(key, [bytes(2000)])

    backend.put(key, [bytes(2000)])
    threads = [threading.Thread(target=replace) for _ in range(writers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
        backend.close()
