"""kvloom storage backend `mooncake`: Mooncake Store, the memory of many processes and machines as one pool."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom import hookimpl


@hookimpl
def kvloom_storage_backends() -> Mapping[str, str]:
    return {"mooncake": "kvloom_backend_mooncake.backend:MooncakeBackend"}
