"""kvloom storage backend `fsspec`: object stores, and whatever else fsspec has a URL for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvloom import hookimpl

if TYPE_CHECKING:
    from kvloom import StorageBackend


@hookimpl
def kvloom_storage_backends() -> Iterable[type[StorageBackend]]:
    from kvloom_backend_fsspec.backend import FsspecBackend

    return [FsspecBackend]
