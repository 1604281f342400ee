"""kvloom storage backend `redis`: one key per blob in Redis or Valkey."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom import hookimpl


@hookimpl
def kvloom_storage_backends() -> Mapping[str, str]:
    return {"redis": "kvloom_backend_redis.backend:RedisBackend"}
