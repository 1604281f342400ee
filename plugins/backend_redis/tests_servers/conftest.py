"""Real servers, one of each kind for all tests of a module, which leave it as it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvloom_backend_redis.backend import RedisBackend
from kvloom_backend_redis.testing import RedisCluster, RedisServer, certificates

ROOM = {"maxmemory": "256mb", "maxmemory_policy": "allkeys-lru"}
Open = Callable[..., RedisBackend]
Tally = Callable[..., None]


@pytest.fixture(scope="session", autouse=True)
def installed() -> None:
    for program in ("redis-server", "redis-sentinel", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


@pytest.fixture(scope="module")
def server(installed: None) -> Iterator[RedisServer]:
    with RedisServer(**ROOM) as server:
        yield server


@pytest.fixture(scope="module")
def unix_server(installed: None) -> Iterator[RedisServer]:
    with RedisServer(unix=True, **ROOM) as server:
        yield server


@pytest.fixture(scope="module")
def tls_server(installed: None) -> Iterator[RedisServer]:
    with certificates() as signed, RedisServer(tls=signed, **ROOM) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(installed: None) -> Iterator[RedisCluster]:
    with RedisCluster(**ROOM) as cluster:
        yield cluster


@pytest.fixture
def open_backend() -> Iterator[Open]:
    opened: list[RedisBackend] = []

    def open_backend(url: str, **settings: Any) -> RedisBackend:
        opened.append(RedisBackend(RedisBackend.Config(url=url, **settings)))
        return opened[-1]

    yield open_backend
    for backend in opened:
        backend.close()


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """Call it with the counts of what was done: `tally(reads=1)`."""
    test = request.function.__name__

    def add(**counts: int) -> None:
        for name, number in counts.items():
            request.node.user_properties.append(("counted", (f"{test}: {name.replace('_', ' ')}", number)))

    return add
