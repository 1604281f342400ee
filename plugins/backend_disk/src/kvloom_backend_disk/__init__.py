"""kvloom storage backend `disk`: one file per blob in a directory."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom import hookimpl


@hookimpl
def kvloom_storage_backends() -> Mapping[str, str]:
    return {"disk": "kvloom_backend_disk.backend:DiskBackend"}
