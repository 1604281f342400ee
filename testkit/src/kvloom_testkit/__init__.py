"""What a plugin of kvloom must do, as tests: subclass the class of its kind, or run `kvloom check`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvloom_testkit.backend import BackendConformance
    from kvloom_testkit.executor import ExecutorConformance
    from kvloom_testkit.observer import ObserverConformance
    from kvloom_testkit.retriever import RetrieverConformance

_HOME = {
    "BackendConformance": "kvloom_testkit.backend",
    "ExecutorConformance": "kvloom_testkit.executor",
    "RetrieverConformance": "kvloom_testkit.retriever",
    "ObserverConformance": "kvloom_testkit.observer",
}

__all__ = ["BackendConformance", "ExecutorConformance", "ObserverConformance", "RetrieverConformance"]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
