"""Every hook. Hooks register classes at start-up; a token, a tensor or a blob never passes through one.

A hook that provides components returns classes or, so that none is imported before its type is asked for, a mapping
from type to `module:class`. A pair, of that and the `module:class` of its `Config`, lets a configuration be checked
without importing the class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import pluggy

if TYPE_CHECKING:
    import typer

    from kvloom.contracts.blend import BlendExecutor, BlendRetriever
    from kvloom.contracts.connector import GPUConnector
    from kvloom.contracts.observer import Observer
    from kvloom.contracts.serializer import Serializer
    from kvloom.contracts.storage import StorageBackend
    from kvloom.contracts.tokens import TokenDatabase

T = TypeVar("T")
Provided: TypeAlias = "Iterable[type[T]] | Mapping[str, str] | Mapping[str, tuple[str, str]]"

hookspec = pluggy.HookspecMarker("kvloom")
hookimpl = pluggy.HookimplMarker("kvloom")


@hookspec
def kvloom_token_databases() -> Provided[TokenDatabase]:  # type: ignore[empty-body]
    """Classes that cut tokens into segments with keys."""


@hookspec
def kvloom_gpu_connectors() -> Provided[GPUConnector]:  # type: ignore[empty-body]
    """Classes that read and write an engine's KV."""


@hookspec
def kvloom_serializers() -> Provided[Serializer]:  # type: ignore[empty-body]
    """Classes that turn chunks into blobs."""


@hookspec
def kvloom_storage_backends() -> Provided[StorageBackend]:  # type: ignore[empty-body]
    """Classes that keep blobs."""


@hookspec
def kvloom_blend_retrievers() -> Provided[BlendRetriever]:  # type: ignore[empty-body]
    """Classes that find stored KV anywhere in a prompt."""


@hookspec
def kvloom_blend_executors() -> Provided[BlendExecutor]:  # type: ignore[empty-body]
    """Classes that merge stored and fresh KV."""


@hookspec
def kvloom_observers() -> Provided[Observer]:  # type: ignore[empty-body]
    """Classes that are told of events."""


@hookspec
def kvloom_add_commands(commands: typer.Typer) -> None:
    """Add verbs to the `kvloom` command; import what they need inside them.

    A group with the name of one that is there, such as `config`, adds its verbs to that one.
    """
