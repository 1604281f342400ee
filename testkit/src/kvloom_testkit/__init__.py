"""The conformance tests of kvloom's plugins: subclass the class of a kind, or run `kvloom check`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvloom_testkit import faults as faults
    from kvloom_testkit.backends.conformance import BackendConformance
    from kvloom_testkit.connectors.conformance import ConnectorConformance
    from kvloom_testkit.connectors.memories import ConnectorHarness, EngineMemory
    from kvloom_testkit.engines.sglang.pool import HostPool
    from kvloom_testkit.executors.conformance import ExecutorConformance
    from kvloom_testkit.observers.conformance import ObserverConformance
    from kvloom_testkit.retrievers.conformance import RetrieverConformance
    from kvloom_testkit.serializers.conformance import SerializerConformance
    from kvloom_testkit.subjects import SPEC
    from kvloom_testkit.tokens.conformance import TokensConformance

_HOME = {
    "BackendConformance": "kvloom_testkit.backends.conformance",
    "ConnectorConformance": "kvloom_testkit.connectors.conformance",
    "ConnectorHarness": "kvloom_testkit.connectors.memories",
    "EngineMemory": "kvloom_testkit.connectors.memories",
    "ExecutorConformance": "kvloom_testkit.executors.conformance",
    "HostPool": "kvloom_testkit.engines.sglang.pool",
    "ObserverConformance": "kvloom_testkit.observers.conformance",
    "RetrieverConformance": "kvloom_testkit.retrievers.conformance",
    "SPEC": "kvloom_testkit.subjects",
    "SerializerConformance": "kvloom_testkit.serializers.conformance",
    "TokensConformance": "kvloom_testkit.tokens.conformance",
}

__all__ = [
    "SPEC",
    "BackendConformance",
    "ConnectorConformance",
    "ConnectorHarness",
    "EngineMemory",
    "ExecutorConformance",
    "HostPool",
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
