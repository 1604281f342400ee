"""The Redis backend meets the requirements of storage backends, on one server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvloom import StorageBackend
from kvloom_backend_redis.backend import RedisBackend
from kvloom_backend_redis.testing import RedisServer
from kvloom_testkit import BackendConformance

Make = Callable[[], StorageBackend]


class Raw:
    """Round the backend, by redis-py."""

    def __init__(self, server: RedisServer) -> None:
        self._client = server.client()

    def get(self, key: str) -> bytes | None:
        return self._client.get(f"kvloom:{key}")  # type: ignore[return-value]

    def set(self, key: str, blob: bytes) -> None:
        self._client.set(f"kvloom:{key}", blob)

    def close(self) -> None:
        self._client.close()


class TestTcp(BackendConformance):
    @pytest.fixture
    def make(self, server: RedisServer) -> Make:
        return lambda: RedisBackend(RedisBackend.Config(url=server.url))

    @pytest.fixture
    def raw(self, server: RedisServer) -> Iterator[Raw]:
        raw = Raw(server)
        yield raw
        raw.close()


class TestUnixSocket(BackendConformance):
    @pytest.fixture
    def make(self, unix_server: RedisServer) -> Make:
        """Beside others in the server, and with every setting."""
        settings = {"prefix": "team/a:", "expire": "1h", "threads": 2}
        return lambda: RedisBackend(RedisBackend.Config(url=f"{unix_server.url}?db=3", **settings))
