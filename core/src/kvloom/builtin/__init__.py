"""The components that come with kvloom, registered through the same hooks as any plugin."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom import hookimpl


@hookimpl
def kvloom_token_databases() -> Mapping[str, str]:
    return {"chunked": "kvloom.builtin.chunked:ChunkedTokenDatabase"}


@hookimpl
def kvloom_gpu_connectors() -> Mapping[str, str]:
    return {"plain": "kvloom.builtin.plain:PlainConnector"}


@hookimpl
def kvloom_serializers() -> Mapping[str, str]:
    return {"raw": "kvloom.builtin.raw:RawSerializer"}


@hookimpl
def kvloom_storage_backends() -> Mapping[str, str]:
    return {"dict": "kvloom.builtin.dict_backend:DictBackend"}


@hookimpl
def kvloom_observers() -> Mapping[str, str]:
    return {"log": "kvloom.builtin.log:LogObserver"}
