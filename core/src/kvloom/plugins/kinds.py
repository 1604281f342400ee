"""The kinds of components that plugins provide: their hooks, base classes, and the settings that are the core's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of component."""

    hook: str
    abc: str
    """`module:class`, imported when a class is to be checked."""
    owned: tuple[str, ...] = ("type",)
    """The keys of its YAML block that belong to the core: no plugin may have a setting of that name."""


KINDS: Mapping[str, Kind] = {
    "tokens": Kind("kvloom_token_databases", "kvloom.contracts.tokens:TokenDatabase"),
    "connector": Kind("kvloom_gpu_connectors", "kvloom.contracts.connector:GPUConnector"),
    "serializer": Kind("kvloom_serializers", "kvloom.contracts.serializer:Serializer", ("type", "timed")),
    "backend": Kind(
        "kvloom_storage_backends",
        "kvloom.contracts.storage:StorageBackend",
        (
            "type",
            "name",
            "serializer",
            "write",
            "capacity",
            "policy",
            "ttl",
            "deadline",
            "quota",
            "remember",
            "protect",
        ),
    ),
    "blend retriever": Kind("kvloom_blend_retrievers", "kvloom.contracts.blend:BlendRetriever"),
    "blend executor": Kind(
        "kvloom_blend_executors",
        "kvloom.contracts.blend:BlendExecutor",
        ("type", "executor", "retriever", "min_tokens"),
    ),
    "observer": Kind("kvloom_observers", "kvloom.contracts.observer:Observer"),
}
"""The kinds of components by name."""

RESERVED = frozenset({("backend", "memory")})
"""Types that are the core's own."""
