"""kvloom storage backend `fsspec`: object stores, and whatever else fsspec has a URL for."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom import hookimpl


@hookimpl
def kvloom_storage_backends() -> Mapping[str, str]:
    return {"fsspec": "kvloom_backend_fsspec.backend:FsspecBackend"}
