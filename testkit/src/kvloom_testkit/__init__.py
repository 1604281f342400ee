"""What a plugin of kvloom must do, as tests: subclass the class of its kind, or run `kvloom check`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvloom_testkit import faults as faults
    from kvloom_testkit.backend import BackendConformance
    from kvloom_testkit.connector import ConnectorConformance
    from kvloom_testkit.executor import ExecutorConformance
    from kvloom_testkit.memories import ConnectorHarness, EngineMemory
    from kvloom_testkit.observer import ObserverConformance
    from kvloom_testkit.retriever import RetrieverConformance
    from kvloom_testkit.serializer import SerializerConformance
    from kvloom_testkit.subjects import SPEC
    from kvloom_testkit.tokens import TokensConformance

_HOME = {
    "BackendConformance": "kvloom_testkit.backend",
    "ConnectorConformance": "kvloom_testkit.connector",
    "ConnectorHarness": "kvloom_testkit.memories",
    "EngineMemory": "kvloom_testkit.memories",
    "ExecutorConformance": "kvloom_testkit.executor",
    "ObserverConformance": "kvloom_testkit.observer",
    "RetrieverConformance": "kvloom_testkit.retriever",
    "SPEC": "kvloom_testkit.subjects",
    "SerializerConformance": "kvloom_testkit.serializer",
    "TokensConformance": "kvloom_testkit.tokens",
}

__all__ = [
    "SPEC",
    "BackendConformance",
    "ConnectorConformance",
    "ConnectorHarness",
    "EngineMemory",
    "ExecutorConformance",
    "ObserverConformance",
    "RetrieverConformance",
    "SerializerConformance",
    "TokensConformance",
    "faults",
]


def __getattr__(name: str) -> object:
    if name == "faults":
        return import_module("kvloom_testkit.faults")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
