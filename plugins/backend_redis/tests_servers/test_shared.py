"""Every codec's blobs, and two versions of kvloom, on one Redis server."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from shared_stores import CodecsOnAStore, TwoVersionsOnAStore

from kvloom import StorageBackend
from kvloom_backend_redis.backend import RedisBackend
from kvloom_backend_redis.testing import RedisServer


@pytest.fixture
def tier(server: RedisServer) -> dict[str, Any]:
    return {"type": "redis", "url": server.url, "prefix": f"{uuid.uuid4().hex}:", "deadline": "60s"}


@pytest.fixture
def store(tier: dict[str, Any], open_backend: Callable[..., RedisBackend]) -> StorageBackend:
    return open_backend(tier["url"], prefix=tier["prefix"])


class TestCodecs(CodecsOnAStore):
    """On Redis."""


class TestTwoVersions(TwoVersionsOnAStore):
    """On Redis."""
