"""Every codec's blobs on Ceph's S3 gateway, and two versions of kvloom on moto's S3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from shared_stores import CodecsOnAStore, TwoVersionsOnAStore

from kvloom import StorageBackend
from kvloom_backend_fsspec.backend import FsspecBackend
from kvloom_backend_fsspec.testing import CephRGW, MotoServer


def tier_on(endpoint: str, bucket: str) -> dict[str, Any]:
    options = {"endpoint": endpoint}
    return {"type": "fsspec", "url": f"s3://{bucket}/kv", "allow_http": True, "options": options, "deadline": "60s"}


@pytest.fixture
def store(tier: dict[str, Any]) -> Iterator[StorageBackend]:
    settings = {name: value for name, value in tier.items() if name not in ("type", "deadline")}
    backend = FsspecBackend(FsspecBackend.Config(**settings))
    yield backend
    backend.close()


class TestCodecs(CodecsOnAStore):
    @pytest.fixture
    def tier(self, rgw: CephRGW, new_bucket: Callable[..., str]) -> dict[str, Any]:
        return tier_on(rgw.endpoint, new_bucket(rgw))


class TestTwoVersions(TwoVersionsOnAStore):
    @pytest.fixture
    def tier(self, moto: MotoServer, new_bucket: Callable[..., str]) -> dict[str, Any]:
        return tier_on(moto.endpoint, new_bucket(moto))
