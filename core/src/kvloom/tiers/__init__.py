"""Where KV is kept: the memory tier, stored tiers (backend + serializer + ledger), and the ordered stack of them."""

from kvloom.tiers.base import Loaded, Tier
from kvloom.tiers.memory import MemoryTier
from kvloom.tiers.stack import Stack
from kvloom.tiers.stored import StoredTier

__all__ = ["Loaded", "MemoryTier", "Stack", "StoredTier", "Tier"]
