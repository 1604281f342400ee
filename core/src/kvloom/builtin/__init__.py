"""The components that come with kvloom, registered through the same hooks as any plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvloom import hookimpl

if TYPE_CHECKING:
    from kvloom import GPUConnector, Observer, Serializer, StorageBackend, TokenDatabase


@hookimpl
def kvloom_token_databases() -> list[type[TokenDatabase]]:
    from kvloom.builtin.chunked import ChunkedTokenDatabase

    return [ChunkedTokenDatabase]


@hookimpl
def kvloom_gpu_connectors() -> list[type[GPUConnector]]:
    from kvloom.builtin.plain import PlainConnector

    return [PlainConnector]


@hookimpl
def kvloom_serializers() -> list[type[Serializer]]:
    from kvloom.builtin.raw import RawSerializer

    return [RawSerializer]


@hookimpl
def kvloom_storage_backends() -> list[type[StorageBackend]]:
    from kvloom.builtin.dict_backend import DictBackend

    return [DictBackend]


@hookimpl
def kvloom_observers() -> list[type[Observer]]:
    from kvloom.builtin.log import LogObserver

    return [LogObserver]
