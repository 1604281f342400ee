"""Where KV is kept: the memory tier, stored tiers (backend + serializer + ledger), and the ordered stack of them.

What moves KV needs torch, and is imported when it is asked for: ledgers and policies do not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloom.tiers.base import Loaded as Loaded
    from kvloom.tiers.base import Tier as Tier
    from kvloom.tiers.memory import MemoryTier as MemoryTier
    from kvloom.tiers.stack import Stack as Stack
    from kvloom.tiers.stored import StoredTier as StoredTier

_HOME = {"Loaded": "base", "MemoryTier": "memory", "Stack": "stack", "StoredTier": "stored", "Tier": "base"}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
