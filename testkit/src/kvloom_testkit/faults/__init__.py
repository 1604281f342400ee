"""Faults for authors' own tests: wrappers that any backend can be put behind, and a TCP proxy that spoils a network."""

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
from kvloom_testkit.faults.network import Faults, TcpProxy

__all__ = [
    "READS", "VERBS", "WRITES", "Alters", "Delays", "FailsOn", "Faults", "Flips", "Hangs", "Proxy", "TcpProxy",
    "Truncates", "behind",
]  # fmt: skip
