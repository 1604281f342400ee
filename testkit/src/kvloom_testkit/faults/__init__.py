"""Faults for authors' own tests: wrappers that any backend can be put behind, a TCP proxy that
spoils a network, and hosts whose cables can be pulled."""

from __future__ import annotations

from kvloom_testkit.faults.backends import (
    READS,
    VERBS,
    WRITES,
    Alters,
    Delays,
    FailsOn,
    Flips,
    Hangs,
    Proxy,
    Truncates,
    behind,
)
from kvloom_testkit.faults.namespaces import Namespaces, namespaces
from kvloom_testkit.faults.network import Faults, TcpProxy, free_port, refusing_port

__all__ = [
    "READS", "VERBS", "WRITES", "Alters", "Delays", "FailsOn", "Faults", "Flips", "Hangs", "Namespaces", "Proxy",
    "TcpProxy", "Truncates", "behind", "free_port", "namespaces", "refusing_port",
]  # fmt: skip
