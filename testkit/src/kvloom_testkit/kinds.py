"""The kit's conformance class for each kind of component."""

from __future__ import annotations

from importlib import import_module

from kvloom import ConfigError
from kvloom_testkit.conformance import Conformance

CLASSES = {
    "backend": "kvloom_testkit.backends.conformance:BackendConformance",
    "connector": "kvloom_testkit.connectors.conformance:ConnectorConformance",
    "serializer": "kvloom_testkit.serializers.conformance:SerializerConformance",
    "tokens": "kvloom_testkit.tokens.conformance:TokensConformance",
    "blend retriever": "kvloom_testkit.retrievers.conformance:RetrieverConformance",
    "blend executor": "kvloom_testkit.executors.conformance:ExecutorConformance",
    "observer": "kvloom_testkit.observers.conformance:ObserverConformance",
}
"""By kind, as the registry calls it."""
WORDS = {kind.removeprefix("blend "): kind for kind in CLASSES}
"""The kinds by their names on the command line."""


def kind_of(word: str) -> str:
    """The kind that a word means: `retriever`, or `blend-retriever` in full. Raises ConfigError."""
    kind = word.replace("-", " ").replace("_", " ")
    if kind in CLASSES:
        return kind
    if kind not in WORDS:
        raise ConfigError("kind", f"no kind {word!r}; there are {', '.join(WORDS)}")
    return WORDS[kind]


def conformance_of(kind: str) -> type[Conformance]:
    """The conformance class of a kind, as the registry calls it."""
    module, name = CLASSES[kind].split(":")
    cls: type[Conformance] = getattr(import_module(module), name)
    return cls
