"""Which chunk of the memory tier is next to go: least recently used first, O(1), whatever is in use or not yet written.

Not thread-safe: the memory tier holds its lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvloom.memory import Block
from kvloom.tiers.chain import NO_CHAIN, Chain
from kvloom.types import Chunk, ChunkKey

_LOOK = 16
"""How many chunks that cannot go are looked past for one that can."""


@dataclass(slots=True, eq=False)
class MemoryEntry:
    """A chunk in memory."""

    chunk: Chunk
    block: Block
    written: float
    """Seconds since the epoch."""
    dirty: bool = False
    """It is to be written to a lower tier before it may go."""
    pinned: bool = False
    chain: Chain = NO_CHAIN
    """What it is part of, if it may have to be written."""
    leaving: str = ""
    """Why it goes once nobody uses it any more; empty if it stays."""


class LRU:
    """Chunks in the order of their use.

    What would be next to go but is in use is set aside, so that it is walked over once and not once for each chunk that
    goes; used again, it comes back. Nothing that was set aside is dirty.
    """

    __slots__ = ("_aside", "_order", "aside_bytes")

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkKey, MemoryEntry] = OrderedDict()
        self._aside: OrderedDict[ChunkKey, MemoryEntry] = OrderedDict()
        self.aside_bytes = 0

    def keys(self) -> list[ChunkKey]:
        """All of them, the least recently used first. O(n)."""
        return [*self._aside, *self._order]

    def add(self, key: ChunkKey, held: MemoryEntry) -> None:
        """As the most recently used one."""
        self._order[key] = held

    def discard(self, key: ChunkKey) -> None:
        if self._order.pop(key, None) is None:
            self._take_back(key)

    def touch(self, chain: Sequence[ChunkKey]) -> None:
        """The head becomes the most recent of all, the tail the least of the chain."""
        order = self._order
        if self._aside:
            for key in chain:
                held = self._take_back(key)
                if held is not None:
                    order[key] = held
        move = order.move_to_end
        for key in reversed(chain):
            if key in order:
                move(key)

    def put_back(self, key: ChunkKey) -> None:
        """Undo that a chunk was set aside, if it was: it is the next to go."""
        held = self._take_back(key)
        if held is not None:
            self._order[key] = held
            self._order.move_to_end(key, last=False)

    def coldest(self, *, dirty: bool = False) -> ChunkKey | None:
        """The next to go that is not in use, and not dirty unless `dirty`; None if none of the next few is."""
        for key, held in islice(self._aside.items(), _LOOK):
            if not held.block.leased:
                return key
        order = self._order
        while order:
            key = next(iter(order))
            held = order[key]
            if held.dirty:
                break
            if not held.block.leased:
                return key
            self._set_aside(key)
        for key, held in islice(order.items(), _LOOK):
            if not held.block.leased and (dirty or not held.dirty):
                return key
        return None

    def coldest_aside(self) -> ChunkKey | None:
        """The next to go of all that was set aside. O(n), for when there is nothing else."""
        return next((key for key, held in self._aside.items() if not held.block.leased), None)

    def coldest_dirty(self, enough_bytes: int) -> ChunkKey | None:
        """The next to go that is dirty, having set aside those before it; None if those are `enough_bytes` already."""
        order = self._order
        while order and self.aside_bytes < enough_bytes:
            key = next(iter(order))
            if order[key].dirty:
                return key
            self._set_aside(key)
        return None

    def _set_aside(self, key: ChunkKey) -> None:
        held = self._order.pop(key)
        self._aside[key] = held
        self.aside_bytes += held.block.size

    def _take_back(self, key: ChunkKey) -> MemoryEntry | None:
        held = self._aside.pop(key, None)
        if held is not None:
            self.aside_bytes -= held.block.size
        return held
