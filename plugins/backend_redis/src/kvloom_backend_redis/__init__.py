"""kvloom storage backend `redis`: one key per blob in Redis or Valkey."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvloom import hookimpl

if TYPE_CHECKING:
    from kvloom import StorageBackend


@hookimpl
def kvloom_storage_backends() -> Iterable[type[StorageBackend]]:
    from kvloom_backend_redis.backend import RedisBackend

    return [RedisBackend]
