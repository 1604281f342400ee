"""The Redis backend meets the requirements of storage backends, over TLS and on a cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvloom import StorageBackend
from kvloom_backend_redis.backend import RedisBackend
from kvloom_backend_redis.testing import RedisCluster, RedisServer
from kvloom_testkit import BackendConformance

Make = Callable[[], StorageBackend]


class TestTls(BackendConformance):
    @pytest.fixture
    def make(self, tls_server: RedisServer) -> Make:
        assert tls_server.tls is not None
        ca = tls_server.tls.ca
        return lambda: RedisBackend(RedisBackend.Config(url=tls_server.url, tls_ca=ca))


class TestCluster(BackendConformance):
    @pytest.fixture
    def make(self, cluster: RedisCluster) -> Make:
        return lambda: RedisBackend(RedisBackend.Config(url=cluster.url))
