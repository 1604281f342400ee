"""Real servers. `make test-servers` runs what is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvloom_backend_redis.backend import RedisBackend
from kvloom_backend_redis.testing import RedisServer

Open = Callable[..., RedisBackend]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One that the tests of a module share, and leave as it was."""
    with RedisServer(maxmemory="512mb", maxmemory_policy="allkeys-lru") as server:
        yield server


@pytest.fixture
def open_backend() -> Iterator[Open]:
    opened: list[RedisBackend] = []

    def open_backend(url: str, **settings: Any) -> RedisBackend:
        opened.append(RedisBackend(RedisBackend.Config(url=url, **settings)))
        return opened[-1]

    yield open_backend
    for backend in opened:
        backend.close()
