"""The Redis backend meets the requirements of storage backends, on every kind of server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvloom import StorageBackend
from kvloom_backend_redis.backend import RedisBackend
from kvloom_backend_redis.testing import RedisServer
from kvloom_testkit import BackendConformance


class Raw:
    def __init__(self, server: RedisServer) -> None:
        self._client = server.client()

    def get(self, key: str) -> bytes | None:
        return self._client.get(f"kvloom:{key}")  # type: ignore[return-value]

    def set(self, key: str, blob: bytes) -> None:
        self._client.set(f"kvloom:{key}", blob)


class TestTcp(BackendConformance):
    @pytest.fixture
    def make(self, server: RedisServer) -> Callable[[], StorageBackend]:
        return lambda: RedisBackend(RedisBackend.Config(url=server.url))

    @pytest.fixture
    def raw(self, server: RedisServer) -> Iterator[Raw]:
        raw = Raw(server)
        yield raw
        raw._client.close()
