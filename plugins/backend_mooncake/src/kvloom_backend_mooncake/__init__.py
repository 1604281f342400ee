"""kvloom storage backend `mooncake`: Mooncake Store, the memory of many processes and machines as one pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvloom import hookimpl

if TYPE_CHECKING:
    from kvloom import StorageBackend


@hookimpl
def kvloom_storage_backends() -> Iterable[type[StorageBackend]]:
    from kvloom_backend_mooncake.backend import MooncakeBackend

    return [MooncakeBackend]
