"""Which class of the kit holds which kind of component to its contract."""

from __future__ import annotations

from importlib import import_module

from kvloom import ConfigError
from kvloom_testkit.conformance import Conformance

CLASSES = {
    "backend": "kvloom_testkit.backend:BackendConformance",
    "connector": "kvloom_testkit.connector:ConnectorConformance",
    "serializer": "kvloom_testkit.serializer:SerializerConformance",
    "tokens": "kvloom_testkit.tokens:TokensConformance",
    "blend retriever": "kvloom_testkit.retriever:RetrieverConformance",
    "blend executor": "kvloom_testkit.executor:ExecutorConformance",
    "observer": "kvloom_testkit.observer:ObserverConformance",
}
"""By kind, as the registry calls it."""


def conformance_of(kind: str) -> type[Conformance]:
    """The conformance class of a kind. Raises ConfigError if there is no such kind."""
    if kind not in CLASSES:
        raise ConfigError("kind", f"no kind {kind!r}; there are {', '.join(CLASSES)}")
    module, name = CLASSES[kind].split(":")
    cls: type[Conformance] = getattr(import_module(module), name)
    return cls
