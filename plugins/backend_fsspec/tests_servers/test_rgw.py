"""The backend meets the requirements of storage backends on a real S3 server: Ceph's gateway."""

from __future__ import annotations

import threading
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


def test_a_range_of_what_others_replace_meanwhile_is_read(
    rgw: CephRGW, new_bucket: Callable[..., str], s3: Any
) -> None:
    backend, done = s3(rgw, new_bucket(rgw), retries=0), threading.Event()
    backend.put("k", [bytes(2000)])

    def replace() -> None:
        while not done.is_set():
            backend.put("k", [bytes(2000)])

    writers = [threading.Thread(target=replace) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(200):  # one in five of them is answered with status 500
            assert backend.get_range("k", 7, memoryview(bytearray(100)))
    finally:
        done.set()
        for writer in writers:
            writer.join()
        backend.close()
