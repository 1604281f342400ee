"""The memory tier of a replay: which chunks it holds, in bytes of its pool, and which go for others.

The rules are those of `kvloom.tiers.memory.tier`. Pieces of chunks are chunks here, with a number below zero.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import accumulate
from itertools import chain as both

from kvloom_tools.replay.sizes import TierPlan
from kvloom_tools.replay.trace import piece_tokens

_CLEAN_PART = 8
"""As in `kvloom.tiers.memory.tier`: one part in eight of the pool is free, clean or on its way to a lower tier."""

Held = tuple[int, float]
"""Bytes of the pool, and when the chunk was first stored."""
Order = OrderedDict[int, Held]


class Memory:
    """Chunks in the order of their use. Call `expire` before anything else that happens at a time."""

    def __init__(
        self, plan: TierPlan, *, quota: Mapping[int, int] | None = None, other_quota: int | None = None,
        write_back: Callable[[int, float, Sequence[int], int], None] | None = None,
    ) -> None:  # fmt: skip
        """quota: bytes by tenant; other_quota: of each that is not named. write_back: writes a chunk to where it is
        wanted when memory lets go of it: a chunk, when it was first stored, its chain and its tenant."""
        assert plan.capacity is not None
        self.plan = plan
        self.capacity = plan.capacity
        self.used = 0
        self.order: Order = OrderedDict()
        self._aside: Order = OrderedDict()
        """Clean, and next to go. Empty unless there is somewhere to write back to."""
        self._aside_bytes = 0
        self._write_back = write_back
        self._clean_bytes = max(self.capacity // _CLEAN_PART, plan.stored_bytes)
        self._dirty: set[int] = set()
        self._about: dict[int, tuple[Sequence[int], int]] = {}
        self._ages: list[tuple[float, int]] = []
        self._quota = dict(quota or {})
        self._other_quota = other_quota
        self._owner: dict[int, int] = {}
        self._tenants: dict[int, dict[int, None]] | None = {} if quota or other_quota is not None else None
        self._tenant_bytes: Counter[int] = Counter()
        self._plain = self._tenants is None and plan.ttl is None and write_back is None
        """Nothing but the capacity makes chunks go, and nobody takes them."""
        self.stored = 0
        self.promoted = 0
        self.pieces: Counter[int] = Counter()
        """Pieces among those stored and promoted, by their tokens."""
        self.dropped = 0
        self.evicted: Counter[str] = Counter()

    def __contains__(self, chunk: int) -> bool:
        return chunk in self.order or chunk in self._aside

    def held(self, chunks: Sequence[int]) -> set[int]:
        """Those of `chunks` that are here."""
        order, aside = self.order, self._aside
        return {chunk for chunk in chunks if chunk in order or chunk in aside}

    def __len__(self) -> int:
        return len(self.order) + len(self._aside)

    def written(self, chunk: int) -> float:
        """The time at which a chunk that is held was first stored."""
        return (self.order.get(chunk) or self._aside[chunk])[1]

    def expire(self, now: float) -> None:
        """Let go what is past its time, written back first if it was not."""
        ages, ttl = self._ages, self.plan.ttl
        while ages and ttl is not None and ages[0][0] + ttl <= now:
            written, chunk = heapq.heappop(ages)
            if chunk in self and self.written(chunk) == written:
                self._clean(chunk)
                self._remove(chunk, "expired")

    def touch(self, chain: Sequence[int]) -> None:
        """A chain was used: its head becomes the most recent, its tail the least."""
        order, aside = self.order, self._aside
        if aside:
            for chunk in chain:
                held = aside.pop(chunk, None)
                if held is not None:
                    order[chunk] = held
                    self._aside_bytes -= held[0]
        move = order.move_to_end
        for chunk in reversed(chain):
            if chunk in order:
                move(chunk)
        if self._tenants:
            for chunk in reversed(chain):
                owner = self._owner.get(chunk)
                if owner is not None:
                    ring = self._tenants[owner]
                    del ring[chunk]
                    ring[chunk] = None

    def size(self, chunk: int) -> int:
        """Bytes of the pool that a chunk from the engine takes."""
        return self.plan.stored_bytes if chunk >= 0 else self.plan.piece(piece_tokens(chunk)).stored

    def sizes(self, chunks: Sequence[int]) -> int:
        """The same of all of them, pieces last."""
        if chunks[-1] >= 0:
            return self.plan.stored_bytes * len(chunks)
        return sum(map(self.size, chunks))

    def fits(self, chunks: Sequence[int]) -> int:
        """The number of leading chunks that could be held if nothing else was."""
        most = self.capacity // self.plan.stored_bytes
        if not chunks or chunks[-1] >= 0:
            return min(len(chunks), most)
        ends = accumulate(map(self.size, chunks))
        return sum(end <= self.capacity for end in ends)

    def make_room(self, nbytes: int, *, leased: Container[int] = ()) -> bool:
        """Evict until there is room for `nbytes`, and none of `leased`; whether there is."""
        if self._plain and not leased:
            return self._drop_oldest(nbytes)
        while self.used + nbytes > self.capacity:
            if not self._aside and self._write_back is not None:
                self._write_ahead(max(self.capacity // _CLEAN_PART, nbytes))
            coldest = next((chunk for chunk in both(self._aside, self.order) if chunk not in leased), None)
            if coldest is None:
                return False
            self._remove(coldest, "capacity")
        return True

    def _drop_oldest(self, nbytes: int) -> bool:
        order, used, enough = self.order, self.used, self.capacity - nbytes
        count = len(order)
        while used > enough and order:
            used -= order.popitem(last=False)[1][0]
        self.used = used
        self.evicted["capacity"] += count - len(order)
        return used <= enough

    def keep_all(self, chunks: Sequence[int], written: float, chain: Sequence[int], tenant: int) -> None:
        """Hold chunks from the engine, which are not held already, and for which there is room."""
        if self._plain and chunks[-1] >= 0:
            nbytes = self.plan.stored_bytes
            self.order.update(dict.fromkeys(chunks, (nbytes, written)))
            self.used += nbytes * len(chunks)
            self.stored += len(chunks)
        else:
            for chunk in chunks:
                self.keep(chunk, (self.size(chunk), written), chain, tenant, fresh=True)

    def keep(self, chunk: int, held: Held, chain: Sequence[int], tenant: int, *, fresh: bool) -> None:
        """Hold a chunk for which there is room. fresh: it comes from the engine, not from a lower tier."""
        self.promoted += not fresh
        if not self._fits_quota(chunk, held[0], chain, tenant):
            self.dropped += fresh
            if chunk < 0 and not fresh:
                self.pieces[piece_tokens(chunk)] += 1
            if fresh and self._write_back is not None:
                self._write_back(chunk, held[1], chain, tenant)
            return
        if self._write_back is not None:
            self._about[chunk] = chain, tenant
            if fresh:
                self._dirty.add(chunk)
        self.stored += fresh
        if chunk < 0:
            self.pieces[piece_tokens(chunk)] += 1
        self.order[chunk] = held
        self.used += held[0]
        if self.plan.ttl is not None:
            heapq.heappush(self._ages, (held[1], chunk))
        if self._tenants is not None:
            self._tenants.setdefault(tenant, {})[chunk] = None
            self._tenant_bytes[tenant] += held[0]
            self._owner[chunk] = tenant
        if self._write_back is not None:
            self._write_ahead(self._clean_bytes - (self.capacity - self.used))

    def lost_below(self, chunk: int) -> None:
        """Mark a chunk that a lower tier evicted, so that it is written again when memory evicts it."""
        if chunk in self:
            self._dirty.add(chunk)
            held = self._aside.pop(chunk, None)
            if held is not None:
                self._aside_bytes -= held[0]
                self.order[chunk] = held
                self.order.move_to_end(chunk, last=False)

    def _fits_quota(self, chunk: int, nbytes: int, chain: Sequence[int], tenant: int) -> bool:
        quota = self._quota.get(tenant, self._other_quota)
        if self._tenants is None or quota is None:
            return True
        before = set(chain[: chain.index(chunk)])
        while self._tenant_bytes[tenant] + nbytes > quota:
            coldest = next(iter(self._tenants.get(tenant) or ()), None)
            if coldest is None or coldest in before:
                return False
            self._clean(coldest)
            self._remove(coldest, "quota")
        return True

    def _write_ahead(self, cold_bytes: int) -> None:
        """Have the coldest chunks written until so many bytes can go."""
        order, aside = self.order, self._aside
        while order and self._aside_bytes < cold_bytes:
            chunk = next(iter(order))
            self._clean(chunk)
            held = order.pop(chunk, None)
            if held is not None:  # else what was written pushed it out
                aside[chunk] = held
                self._aside_bytes += held[0]

    def _clean(self, chunk: int) -> None:
        if chunk in self._dirty:
            self._dirty.discard(chunk)
            assert self._write_back is not None
            self._write_back(chunk, self.written(chunk), *self._about[chunk])

    def _remove(self, chunk: int, reason: str) -> None:
        held = self.order.pop(chunk, None)
        if held is None:
            held = self._aside.pop(chunk)
            self._aside_bytes -= held[0]
        self._dirty.discard(chunk)
        self._about.pop(chunk, None)
        self.used -= held[0]
        self.evicted[reason] += 1
        owner = self._owner.pop(chunk, None)
        if owner is not None:
            assert self._tenants is not None
            del self._tenants[owner][chunk]
            self._tenant_bytes[owner] -= held[0]
