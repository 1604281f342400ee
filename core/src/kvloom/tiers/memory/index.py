"""The entries of the memory tier, ordered by use, by each tenant's use and by age.

Not thread-safe: the memory tier holds its lock. Every operation takes O(1) a key, except where it says otherwise.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvloom.keys import salt_tag_of
from kvloom.memory import Block
from kvloom.tiers.chain import NO_CHAIN, Chain
from kvloom.types import Chunk, ChunkKey

_BUCKETS = 64
"""Into how many parts a time to live is divided."""
_MOST_CHANGES = 1 << 16
"""Changes that are kept for whoever asks for them; beyond that it is cheaper to list everything."""
_LOOK = 16
"""Number of chunks that cannot be evicted which are skipped to find one that can."""


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
    """The chain it is part of, if it may have to be written."""
    leaving: str = ""
    """Reason to evict it as soon as nobody uses it; empty if it stays."""


class LRU:
    """Chunks in the order of their use.

    A chunk that is next to be evicted but in use is set aside, so that it is passed over once and not at each eviction;
    its next use brings it back. No chunk that is set aside is dirty.
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
        """Undo that a chunk was set aside, if it was: it becomes the next to be evicted."""
        held = self._take_back(key)
        if held is not None:
            self._order[key] = held
            self._order.move_to_end(key, last=False)

    def coldest(self, *, dirty: bool = False) -> ChunkKey | None:
        """The first to evict that is neither in use nor, unless `dirty`, dirty; None if none of the next few is."""
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
        """The first to evict of the chunks set aside. O(n), for when there is nothing else."""
        return next((key for key, held in self._aside.items() if not held.block.leased), None)

    def coldest_dirty(self, enough_bytes: int) -> ChunkKey | None:
        """The first dirty chunk, having set aside those before it; None once those are `enough_bytes`."""
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


class Changes(NamedTuple):
    """Chunks that came into memory and chunks that left it since the last call."""

    came: list[ChunkKey]
    left: list[ChunkKey]
    whole: bool
    """`came` is everything that is held: forget what was known before."""


class MemoryIndex:
    """All chunks of the memory tier."""

    def __init__(
        self, *, ttl: float | None = None, quota: Mapping[str, int] | None = None,
        told: Callable[[ChunkKey, bool], None] | None = None,
    ) -> None:  # fmt: skip
        """told: called with each chunk that comes (True) or goes (False)."""
        self._told = told
        self.entries: dict[ChunkKey, MemoryEntry] = {}
        self.recency = LRU()
        self.pinned_bytes = 0
        self.ttl = ttl
        self._ages = None if ttl is None else WriteTimes(ttl)
        self._tenants = TenantUse(quota) if quota else None
        self._leaving: deque[tuple[ChunkKey, MemoryEntry]] = deque()
        # By key, whether it is held now. None: nobody asked yet, or there was too much to keep.
        self._changed: dict[ChunkKey, bool] | None = None
        # Chunks by the addresses where they begin and end, to find those beside a gap.
        self._starts: dict[int, ChunkKey] = {}
        self._ends: dict[int, ChunkKey] = {}

    def add(self, key: ChunkKey, held: MemoryEntry) -> None:
        """Hold a chunk, as the most recently used one. The key is not held already."""
        self.entries[key] = held
        self._note(key, True)
        self._starts[held.block.start] = self._ends[held.block.start + held.block.size] = key
        if held.pinned:
            self.pinned_bytes += held.block.size
        else:
            self.recency.add(key, held)
        if self._tenants is not None:
            self._tenants.add(key, held)
        if self._ages is not None:
            self._ages.add(key, held)

    def forget(self, key: ChunkKey) -> MemoryEntry | None:
        held = self.entries.pop(key, None)
        if held is None:
            return None
        self._note(key, False)
        del self._starts[held.block.start], self._ends[held.block.start + held.block.size]
        if held.pinned:
            self.pinned_bytes -= held.block.size
        else:
            self.recency.discard(key)
        if self._tenants is not None and not held.leaving:
            self._tenants.discard(key, held)
        if self._ages is not None:
            self._ages.discard(key, held)
        return held

    def changes(self) -> Changes:
        """Return the changes since the last call; everything the first time, and after too many changes."""
        changed, self._changed = self._changed, {}
        if changed is None:
            return Changes(list(self.entries), [], whole=True)
        came = [key for key, held in changed.items() if held]
        return Changes(came, [key for key, held in changed.items() if not held], whole=False)

    def _note(self, key: ChunkKey, held: bool) -> None:
        if self._told is not None:
            self._told(key, held)
        if self._changed is not None:
            self._changed[key] = held
            if len(self._changed) > _MOST_CHANGES:
                self._changed = None

    def touch(self, chain: Sequence[ChunkKey]) -> None:
        self.recency.touch(chain)
        if self._tenants is not None:
            self._tenants.touch(chain)

    def pin(self, key: ChunkKey, pinned: bool, wall: float) -> bool | None:
        """Pin a chunk, or unpin it as the most recent one. Returns whether it is held.

        A chunk that was leaving stays if it is pinned. None if its tenant must make room for that first.
        """
        held = self.entries.get(key)
        if held is None or self.expired(held, wall):
            return False
        if pinned and held.leaving:
            if self._tenants is not None:
                if not self._tenants.fits(key, held.block.size):
                    return None
                self._tenants.add(key, held)
            held.leaving = ""
        if held.pinned is not pinned:
            held.pinned = pinned
            if pinned:
                self.pinned_bytes += held.block.size
                self.recency.discard(key)
            else:
                self.pinned_bytes -= held.block.size
                self.recency.add(key, held)
            if self._tenants is not None and not held.leaving:
                self._tenants.pin(key, held)
        return True

    def keys(self) -> list[ChunkKey]:
        """All keys, least recently used first, the pinned ones last. O(n)."""
        return self.recency.keys() + [key for key, held in self.entries.items() if held.pinned]

    def beside(self, start: int, end: int) -> ChunkKey | None:
        """A chunk that lies against the gap from `start` to `end` and may go now."""
        for key in (self._starts.get(end), self._ends.get(start)):
            if key is not None:
                held = self.entries[key]
                if not (held.pinned or held.dirty or held.block.leased):
                    return key
        return None

    # -- quotas --------------------------------------------------------------------------------------------------------

    def fits(self, key: ChunkKey, nbytes: int) -> bool:
        """Return whether the tenant of `key` may hold `nbytes` more."""
        return self._tenants is None or self._tenants.fits(key, nbytes)

    def coldest_of_tenant(self, key: ChunkKey) -> ChunkKey | None:
        """Return the entry that the tenant of `key` gives up first, dirty or not."""
        recency = None if self._tenants is None else self._tenants.recency(key)
        return None if recency is None else recency.coldest(dirty=True)

    # -- writing back --------------------------------------------------------------------------------------------------

    def if_dirty(self, key: ChunkKey) -> ChunkKey | None:
        held = self.entries.get(key)
        return key if held is not None and held.dirty else None

    def still_dirty(self, key: ChunkKey, held: MemoryEntry) -> None:
        """Mark a chunk as dirty: it is still to be written."""
        held.dirty = True
        if self.entries.get(key) is held:
            self.recency.put_back(key)
            if self._tenants is not None and (recency := self._tenants.recency(key)) is not None:
                recency.put_back(key)

    # -- what is due to go ---------------------------------------------------------------------------------------------

    @property
    def restless(self) -> bool:
        """Chunks may be due for eviction although there is room."""
        return self.ttl is not None or bool(self._leaving)

    def expired(self, held: MemoryEntry, wall: float) -> bool:
        return self.ttl is not None and held.written + self.ttl <= wall

    def leave(self, key: ChunkKey, held: MemoryEntry, reason: str) -> None:
        """Have a chunk evicted as soon as nobody uses it. It counts against no quota from now on."""
        if self.entries.get(key) is held and not (held.leaving or held.pinned):
            if self._tenants is not None:
                self._tenants.discard(key, held)
            held.leaving = reason
            self._leaving.append((key, held))

    def due(self, wall: float) -> ChunkKey | None:
        """A chunk that was to leave and that nobody uses any more, or one that has expired."""
        while self._leaving:
            key, held = self._leaving[0]
            if self.entries.get(key) is held and held.leaving:
                if not held.block.leased:
                    return key
                break
            self._leaving.popleft()
        return None if self._ages is None else self._ages.expired(wall)


class TenantUse:
    """Per salt: its bytes, and its chunks in the order of their use."""

    def __init__(self, quota: Mapping[str, int]) -> None:
        self._quota = dict(quota)
        self._bytes: dict[str, int] = {}
        self._recency: dict[str, LRU] = {}

    def quota(self, tag: str) -> int | None:
        return self._quota.get(tag, self._quota.get("*"))

    def fits(self, key: ChunkKey, nbytes: int) -> bool:
        tag = salt_tag_of(key.namespace)
        quota = self.quota(tag)
        return quota is None or self._bytes.get(tag, 0) + nbytes <= quota

    def recency(self, key: ChunkKey) -> LRU | None:
        return self._recency.get(salt_tag_of(key.namespace))

    def add(self, key: ChunkKey, held: MemoryEntry) -> None:
        tag = salt_tag_of(key.namespace)
        if self.quota(tag) is None:
            return
        self._bytes[tag] = self._bytes.get(tag, 0) + held.block.size
        recency = self._recency.setdefault(tag, LRU())
        if not held.pinned:
            recency.add(key, held)

    def discard(self, key: ChunkKey, held: MemoryEntry) -> None:
        tag = salt_tag_of(key.namespace)
        recency = self._recency.get(tag)
        if recency is None:
            return
        recency.discard(key)
        self._bytes[tag] -= held.block.size
        if not self._bytes[tag]:  # there may be any number of salts in the course of time
            del self._bytes[tag], self._recency[tag]

    def pin(self, key: ChunkKey, held: MemoryEntry) -> None:
        recency = self.recency(key)
        if recency is not None:
            if held.pinned:
                recency.discard(key)
            else:
                recency.add(key, held)

    def touch(self, chain: Sequence[ChunkKey]) -> None:
        for namespace in {key.namespace for key in chain}:
            recency = self._recency.get(salt_tag_of(namespace))
            if recency is not None:
                recency.touch(chain)


class WriteTimes:
    """Chunks by when they were written, to within a part in 64 of the time to live."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._width = ttl / _BUCKETS
        self._buckets: dict[int, dict[ChunkKey, MemoryEntry]] = {}

    def add(self, key: ChunkKey, held: MemoryEntry) -> None:
        self._buckets.setdefault(int(held.written // self._width), {})[key] = held

    def discard(self, key: ChunkKey, held: MemoryEntry) -> None:
        number = int(held.written // self._width)
        bucket = self._buckets[number]
        del bucket[key]
        if not bucket:
            del self._buckets[number]

    def expired(self, wall: float) -> ChunkKey | None:
        """One of the expired chunks. Readers that have a lease may continue."""
        if not self._buckets:
            return None
        oldest = self._buckets[min(self._buckets)]  # of some 64, however many chunks there are
        key, held = next(iter(oldest.items()))
        return key if held.written + self._ttl <= wall else None
