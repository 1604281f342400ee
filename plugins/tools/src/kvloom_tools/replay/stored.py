"""A stored tier of a replay: which chunks it holds, which it takes in, and which go for them.

The rules are those of `kvloom.tiers.index.ledger`. Chunks are all of one size, so that one costs an entry in a
dictionary; pieces of chunks, which have a number below zero, are counted apart.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

from kvloom.inspection import Sketch
from kvloom_tools.replay.sizes import TierPlan
from kvloom_tools.replay.trace import piece_tokens

Order = OrderedDict[int, float]


@lru_cache(maxsize=1 << 18)
def digest_of(chunk: int) -> bytes:
    """Bytes that look like a key's, for what counts by them."""
    return blake2b(chunk.to_bytes(16, "little", signed=True), digest_size=32).digest()


class Stored:
    """One tier. Chunks are numbers. Call `expire` before anything else that happens at a time."""

    def __init__(
        self, plan: TierPlan, *, quota: Mapping[int, int] | None = None, other_quota: int | None = None,
        on_lost: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """quota: bytes by tenant; other_quota: of each other one. on_lost: told of what goes for want of room."""
        self.plan = plan
        self._capacity = _NO_LIMIT if plan.capacity is None else plan.capacity
        self._quota = dict(quota or {})
        self._other_quota = other_quota
        self._tenants: dict[int, Order] | None = {} if quota or other_quota is not None else None
        self._tenant_bytes: Counter[int] = Counter()
        self._chunk_bytes = plan.stored_bytes
        self._pieces = 0
        self._piece_bytes = 0
        self._owner: dict[int, int] = {}
        self.ordered = plan.bounded
        """The order of use matters."""
        self.order: dict[int, float] = OrderedDict() if self.ordered else {}
        """Seconds at which each chunk was first stored; where the order matters, the least recently used first."""
        self._ages: list[tuple[float, int]] = []
        self.sketch = Sketch() if plan.admission == "tiny_lfu" else None
        self._on_lost = on_lost
        self._plain = self._tenants is None and plan.ttl is None and on_lost is None
        """Nothing but the capacity makes chunks go, and nobody is told."""
        self.stored = 0
        self.pieces: Counter[int] = Counter()
        """Pieces among those stored, by their tokens."""
        self.dropped = 0
        self.evicted: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.order)

    @property
    def used(self) -> int:
        """Bytes of what is held."""
        return (len(self.order) - self._pieces) * self._chunk_bytes + self._piece_bytes

    def _size(self, chunk: int) -> int:
        return self._chunk_bytes if chunk >= 0 else self.plan.piece(piece_tokens(chunk)).stored

    def expire(self, now: float) -> None:
        """Let go what is past its time."""
        ages, ttl = self._ages, self.plan.ttl
        while ages and ttl is not None and ages[0][0] + ttl <= now:
            written, chunk = heapq.heappop(ages)
            if self.order.get(chunk) == written:
                self._remove(chunk, "expired")

    def touch(self, chain: Sequence[int]) -> None:
        """A chain was used: its head becomes the most recent, its tail the least."""
        order = self.order
        if isinstance(order, OrderedDict):
            move = order.move_to_end
            for chunk in reversed(chain):
                if chunk in order:
                    move(chunk)
            if self._tenants:
                self._touch_tenants(chain)

    def _touch_tenants(self, chain: Sequence[int]) -> None:
        assert self._tenants is not None
        for chunk in reversed(chain):
            owner = self._owner.get(chunk)
            if owner is not None:
                self._tenants[owner].move_to_end(chunk)

    def count(self, chain: Sequence[int]) -> None:
        """It is one use of each of its chunks, held or not, for a policy that counts."""
        if self.sketch is not None:
            self.sketch.add(map(digest_of, chain), rows=len(self.order))

    def lacks(self, chunks: Iterable[int], tenant: int) -> list[int]:
        """Those of `chunks` that should be written: not there, and used more than what would go for them."""
        missing = [chunk for chunk in chunks if chunk not in self.order]
        if self.sketch is None or not missing:
            return missing
        uses, ring = self.sketch.uses, self._ring(tenant)
        victims = []
        usual = self.used // max(1, len(self.order))
        if self.used + usual > self._capacity:
            victims.append(next(iter(self.order), None))
        if ring is not None and self._tenant_bytes[tenant] + usual > self._quota_of(tenant):
            victims.append(next(iter(ring), None))
        most = max((uses(digest_of(victim)) for victim in victims if victim is not None), default=-1)
        return [chunk for chunk in missing if uses(digest_of(chunk)) > most]

    def write_used(self, chunks: Sequence[int], chain: Sequence[int], tenant: int, written: float) -> None:
        """`write`, for a chain that was just touched: there is nothing in use later than it."""
        order = self.order
        plain = self._plain and not self._pieces and chunks[-1] >= 0
        excess = 0
        if plain and self.plan.capacity is not None:
            excess = max(0, len(order) + len(chunks) - self.plan.capacity // self.plan.stored_bytes)
        # At most so many of those held are of the chain: if others make room enough, there is nothing to look at.
        if not plain or (excess and excess > len(order) - (len(chain) - len(chunks))):
            self.write(chunks, chain, tenant, written)
            return
        if excess:
            assert isinstance(order, OrderedDict)
            for _ in range(excess):
                order.popitem(last=False)
            self.evicted["capacity"] += excess
        order.update(dict.fromkeys(chunks, written))
        self.stored += len(chunks)

    def write(self, chunks: Iterable[int], chain: Sequence[int], tenant: int, written: float) -> None:
        """Take in chunks of a chain, in its order. Nothing of the chain goes for what is behind it.

        written: when they were first stored, in seconds.
        """
        place = {chunk: index for index, chunk in enumerate(chain)}
        stop = len(chain)
        most = min(self._capacity, self._quota_of(tenant))
        for chunk in chunks:
            at, nbytes = place[chunk], self._size(chunk)
            if at > stop or nbytes > most:
                self.dropped += 1
                continue
            room, stop = self._make_room(nbytes, at, stop, place, chain, tenant)
            if room:
                self._add(chunk, tenant, written)
            else:
                self.dropped += 1

    def _make_room(
        self, nbytes: int, at: int, stop: int, place: Mapping[int, int], chain: Sequence[int], tenant: int
    ) -> tuple[bool, int]:
        """Let go what must for `nbytes` at `at`: whether there is room, and where the chain ends now."""
        ring = self._ring(tenant)
        over = 0.0 if ring is None else self._tenant_bytes[tenant] + nbytes - self._quota_of(tenant)
        excess = self.used + nbytes - self._capacity
        if over <= 0 and excess <= 0:
            return True, stop
        its, others = self._oldest(ring, over), self._oldest(self.order, excess)
        if any(map(place.__contains__, its + others)):
            self.touch(chain)
            its, others = self._oldest(ring, over), self._oldest(self.order, excess)
            if any(place.get(victim, at) < at for victim in (*its, *others)):
                return False, min(stop, at)
        for victim in its:
            stop = self._let_go(victim, "quota", stop, place)
        for victim in others:  # what went for its tenant's quota made room, too
            if its and self.used + nbytes <= self._capacity:
                break
            if victim in self.order:
                stop = self._let_go(victim, "capacity", stop, place)
        return True, stop

    def _oldest(self, order: Mapping[int, float] | None, nbytes: float) -> list[int]:
        """Those that are worth so many bytes."""
        found: list[int] = []
        for chunk in order if nbytes > 0 and order else ():
            found.append(chunk)
            nbytes -= self._chunk_bytes if chunk >= 0 else self._size(chunk)
            if nbytes <= 0:
                break
        return found

    def _let_go(self, victim: int, reason: str, stop: int, place: Mapping[int, int]) -> int:
        self._remove(victim, reason)
        if self._on_lost is not None:
            self._on_lost(victim)
        return min(stop, place.get(victim, stop))

    def _add(self, chunk: int, tenant: int, written: float) -> None:
        self.order[chunk] = written
        self.stored += 1
        if chunk < 0:
            self._pieces += 1
            self._piece_bytes += self._size(chunk)
            self.pieces[piece_tokens(chunk)] += 1
        if self.plan.ttl is not None:
            heapq.heappush(self._ages, (written, chunk))
        if self._tenants is not None and self._quota_of(tenant) != _NO_LIMIT:
            self._tenants.setdefault(tenant, OrderedDict())[chunk] = written
            self._tenant_bytes[tenant] += self._size(chunk)
            self._owner[chunk] = tenant

    def _remove(self, chunk: int, reason: str) -> None:
        del self.order[chunk]
        self.evicted[reason] += 1
        if chunk < 0:
            self._pieces -= 1
            self._piece_bytes -= self._size(chunk)
        owner = self._owner.pop(chunk, None)
        if owner is not None:
            assert self._tenants is not None
            del self._tenants[owner][chunk]
            self._tenant_bytes[owner] -= self._size(chunk)

    def _ring(self, tenant: int) -> Order | None:
        return None if self._tenants is None else self._tenants.get(tenant)

    def _quota_of(self, tenant: int) -> float:
        quota = self._quota.get(tenant, self._other_quota)
        return _NO_LIMIT if quota is None else quota


_NO_LIMIT = float("inf")
