"""The memory tier: sealed raw chunks in the pool, handed out by lease, least recently used out first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from kvloom.contracts.observer import Event, EventName
from kvloom.interrupts import shielded_waiting
from kvloom.memory import Block, Pool, Reservation, caller, lease_all, pages_of
from kvloom.runtime import Runtime
from kvloom.telemetry.events import EventBus
from kvloom.tiers.chain import NO_CHAIN, Chain
from kvloom.tiers.invalidation import Invalidations
from kvloom.tiers.memory.index import Changes, MemoryEntry, MemoryIndex
from kvloom.tiers.memory.write_back import WriteBack
from kvloom.tiers.request_context import RequestContext
from kvloom.tiers.tier import Layout, Loaded, Tier
from kvloom.types import Chunk, ChunkKey, TierHealth

_CLEAN_PART = 8
"""One part in eight of the pool is kept free, clean or on its way to a lower tier, so that nobody waits for room."""
_SCATTERED = 4
"""Number of chunks evicted by age before others are evicted by their address."""
_SWEPT_EACH_TIME = 2
"""Number of expired chunks that each insert evicts."""


class MemoryTier(Tier):
    """Chunks in the process's own memory.

    Memory is made by evicting whole chunks, the least recently used first; pinned and leased ones stay. A chain is
    touched from its tail to its head, so that no head goes before its tail. A chunk older than `ttl` seconds is absent,
    pinned or not. A salt over its `quota` (bytes by salt tag, "*" for those not named) evicts its own chunks.
    """

    def __init__(
        self, layout: Layout, pool: Pool, events: EventBus, runtime: Runtime, *, dst_device: str = "cpu",
        keep: bool = True, name: str = "memory", deadline: float = 10.0, ttl: float | None = None,
        quota: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, layout, dst_device=dst_device)
        self.pool = pool
        self.keep = keep
        """False: memory is only passed through on the way to and from stored tiers."""
        self.deadline = deadline
        self._events = events
        self._runtime = runtime
        self._lock = runtime.lock()
        self.invalidations = Invalidations(runtime)
        """Removals under way in this tier and those below."""
        self._index = MemoryIndex(ttl=ttl, quota=quota, told=self._tell if events.sees_chunks else None)
        self.write_back = WriteBack(name, self._index, self._lock, events, runtime)

    def after_fork_in_child(self, pid: int) -> None:
        super().after_fork_in_child(pid)
        self._lock = self._runtime.lock()
        self._index = MemoryIndex()  # what the chunks were in is not the child's
        self.write_back = WriteBack(self.name, self._index, self._lock, self._events, self._runtime)

    def __len__(self) -> int:
        return len(self._index.entries)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pool in use, reservations and chunks on their way included."""
        return self.pool.used_bytes

    @shielded_waiting
    def health(self) -> TierHealth:
        """State of the tier; memory does not fail."""
        return TierHealth(self.name, "ok", blobs=len(self), bytes=self.used_bytes, capacity=self.pool.capacity)

    # -- finding -------------------------------------------------------------------------------------------------------

    @shielded_waiting
    def find(
        self, keys: Sequence[ChunkKey], context: RequestContext | None = None, *, exact: bool = False
    ) -> list[bool]:
        """Return which keys are held (with `exact`: exactly)."""
        self._check_here()
        entries = self._index.entries
        with self._lock:
            if self._index.ttl is not None:
                after = self._runtime.wall() - self._index.ttl
                return [
                    (held := entries.get(key)) is not None and held.written > after and (held.chunk.exact or not exact)
                    for key in keys
                ]
            if not exact:
                return [key in entries for key in keys]
            return [(held := entries.get(key)) is not None and held.chunk.exact for key in keys]

    def has_all(self, keys: Sequence[ChunkKey]) -> bool:
        """Return whether every key is held; takes no lock, and says no where keys expire."""
        return self._index.ttl is None and all(map(self._index.entries.__contains__, keys))

    @shielded_waiting
    def contains(self, key: ChunkKey) -> bool:
        self._check_here()
        return key in self._index.entries if self._index.ttl is None else self.find([key])[0]

    def lease(self, keys: Sequence[ChunkKey]) -> list[Loaded | None]:
        """The chunks of `keys`, each leased, or None where there is none."""
        entries = self._index.entries
        origin = caller()
        after = -math.inf if self._index.ttl is None else self._runtime.wall() - self._index.ttl
        with self._lock:
            found = [None if (held := entries.get(key)) is None or held.written <= after else held for key in keys]
            # Leased under the lock: between the look and the lease nobody may evict.
            leases = iter(lease_all([held.block for held in found if held is not None], origin))
        return [None if held is None else Loaded(held.chunk, next(leases), held.written) for held in found]

    def touch(self, chain: Sequence[ChunkKey]) -> None:
        """Note that a chain was used: its head becomes the most recent, its tail the least."""
        with self._lock:
            self._index.touch(chain)

    @shielded_waiting
    def chunks(self) -> list[ChunkKey]:
        """The keys held, least recently used first, the pinned ones last."""
        with self._lock:
            return self._index.keys()

    @shielded_waiting
    def changes(self) -> Changes:
        """Return the chunks that came and left since the last call, for a mirror of this tier. One caller only."""
        with self._lock:
            return self._index.changes()

    # -- keeping -------------------------------------------------------------------------------------------------------

    def insert(
        self, key: ChunkKey, chunk: Chunk, block: Block, *, written: float | None = None, dirty: bool = True,
        since: int | None = None, chain: Chain = NO_CHAIN,
    ) -> Loaded:  # fmt: skip
        """Keep a sealed chunk and lease it. An exact one replaces a lossy one, never the other way round.

        written: when it was first stored, in seconds since the epoch, if that was not now. dirty: it is to be written
        back before it is evicted, if a stored tier takes chunks from memory. since: a mark of `invalidations` from
        before it was read; what was removed after it is not kept. chain: what it is part of; it does not take its
        salt's room from what is before it.
        """
        wall = self._runtime.wall()
        fresh, dirty = dirty, dirty and chunk.exact and self.write_back.write is not None
        new = MemoryEntry(chunk, block, wall if written is None else min(written, wall), dirty)
        if self.write_back.write is not None:
            new.chain = chain
        since = self.invalidations.mark() if since is None else since
        loaded = self._keep(key, new, wall, since, chain, fresh=fresh)
        if self._index.restless:
            for _ in range(_SWEPT_EACH_TIME):
                self._evict(partial(self._index.due, wall), reason="expired")
        if self.write_back.write is not None:
            clean_bytes = max(self.pool.capacity // _CLEAN_PART, block.size)
            self._write_ahead(clean_bytes - self.pool.free_bytes)
        return loaded

    def _keep(self, key: ChunkKey, new: MemoryEntry, wall: float, since: int, chain: Chain, *, fresh: bool) -> Loaded:
        kept = self.keep and not self._index.expired(new, wall)
        while True:
            with self._lock:
                gone = self.invalidations.hit(key, since)
                settled = self._settle(key, new, wall, kept=kept and not gone)
            if settled is not None:
                break
            kept = self._evict(partial(self._coldest_of_tenant, key, chain), reason="quota")
            if not kept and chain and fresh and not new.dirty:
                self._report("dropped", new, "over its salt's quota")
        loaded, surplus = settled
        if surplus is new.block and new.dirty and loaded.chunk is new.chunk and not gone:
            self.write_back.offer_once(key, loaded)
        if surplus is not None:
            surplus.drop()
        return loaded

    def _coldest_of_tenant(self, key: ChunkKey, chain: Chain) -> ChunkKey | None:
        coldest = self._index.coldest_of_tenant(key)
        return None if coldest is None or chain.leads_to(key, coldest.digest) else coldest

    def _settle(
        self, key: ChunkKey, new: MemoryEntry, wall: float, *, kept: bool
    ) -> tuple[Loaded, Block | None] | None:
        """Return the chunk of two that stays, leased, and the other block; None if the tenant must make room first."""
        origin = new.block.origin  # where it was reserved says enough about who inserts it
        present = self._index.entries.get(key)
        if (
            present is not None
            and (present.chunk.exact or not new.chunk.exact)
            and not (present.leaving or self._index.expired(present, wall))
        ):
            return Loaded(present.chunk, present.block.lease(origin), present.written), new.block
        if kept and not self._index.fits(key, new.block.size):
            return None
        loaded = Loaded(new.chunk, new.block.lease(origin), new.written)
        if not kept:
            return loaded, new.block
        if present is not None:
            self._index.forget(key)
            new.pinned = present.pinned
        self._index.add(key, new)
        return loaded, None if present is None else present.block

    @shielded_waiting
    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> int:
        """Keep chunks from being evicted, or allow it again; how many are held."""
        # From the tail, so that a head that is unpinned is more recent than its tail.
        return sum(self._pin(key, pinned) for key in reversed(list(keys)))

    def _pin(self, key: ChunkKey, pinned: bool) -> bool:
        while True:
            with self._lock:
                held = self._index.pin(key, pinned, self._runtime.wall())
            if held is not None:
                return held
            if not self._evict(partial(self._index.coldest_of_tenant, key), reason="quota"):
                return False

    @shielded_waiting
    def remove(self, keys: Iterable[ChunkKey]) -> int:
        """Forget chunks, pinned ones too; how many there were.

        On return nobody is being asked to write them any more: whoever deletes them below next, deletes them all.
        """
        doomed = list(keys)
        with self._lock:
            entries = [held for key in doomed if (held := self._index.forget(key)) is not None]
        for held in entries:
            held.block.drop()
        self.write_back.await_answers(frozenset(doomed), self.deadline)
        return len(entries)

    # -- making room ---------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, *, deadline: float = math.inf) -> Reservation | None:
        """Memory for `nbytes` bytes, evicting what it takes; None if everything is in use.

        The reservation must be sealed by `deadline`.
        """
        evicted = 0
        while (reservation := self.pool.reserve(nbytes, deadline=deadline)) is None:
            if nbytes > self.pool.largest_bytes or not self._make_room(nbytes, evicted):
                return None
            evicted += 1
        return reservation

    def stage(self, nbytes: int, *, until: float | None = None) -> Reservation | None:
        """Memory that is held for longer than a copy takes: `reserve`, as far as `Pool.stage` allows.

        until: as `reserve_by`; but nobody waits for others to hold less.
        """
        size = pages_of(nbytes)
        if not self.pool.stage(size):
            return None
        reservation = self.reserve(nbytes) if until is None else self.reserve_by(nbytes, until)
        if reservation is None:
            self.pool.stage(-size)
        else:
            reservation.staged = size
        return reservation

    def reserve_by(
        self, nbytes: int, until: float, *, deadline: float = math.inf, stopped: Callable[[], bool] = lambda: False
    ) -> Reservation | None:
        """`reserve`, waiting until `until`, or until `stopped()`, for what is in use to be given back.

        Then chunks go that should have been written before, and are counted as dropped.
        """
        while True:
            freed = self.pool.times_freed
            reservation = self.reserve(nbytes, deadline=deadline)
            if reservation is not None or stopped() or not self._may_get(nbytes):
                return reservation
            if self._runtime.now() >= until:
                break
            self.pool.wait_for_room(until, freed)
        while (reservation := self.pool.reserve(nbytes, deadline=deadline)) is None:
            coldest = partial(self._index.recency.coldest, dirty=True)
            if self.write_back.write is None or not self._evict(coldest, dirty=True):
                return None
        return reservation

    def _may_get(self, nbytes: int) -> bool:
        """Return whether waiting can help: something in use, other than what is pinned, is still to be given back."""
        pinned = self._index.pinned_bytes
        return nbytes <= min(self.pool.capacity - pinned, self.pool.largest_bytes) and self.pool.used_bytes > pinned

    def _make_room(self, nbytes: int, evicted: int) -> bool:
        if evicted >= _SCATTERED and self._widen_gap():
            return True
        return self._evict_one() or self._clean_and_evict(nbytes)

    def _widen_gap(self) -> bool:
        """Evict what lies beside the widest gap, as going on by age would empty memory all over for one long piece."""
        return self._evict(partial(self._index.beside, *self.pool.widest))

    def _evict_one(self) -> bool:
        if self._index.restless and self._evict(partial(self._index.due, self._runtime.wall()), reason="expired"):
            return True
        recency = self._index.recency
        return self._evict(recency.coldest) or self._evict(recency.coldest_aside)

    def _clean_and_evict(self, nbytes: int) -> bool:
        if self.write_back.write is None:
            return False
        self._write_ahead(
            self._index.recency.aside_bytes + max(self.pool.capacity // _CLEAN_PART, self.pool.taken_by(nbytes))
        )
        return self._evict(self._index.recency.coldest)

    def _evict(self, pick: Callable[[], ChunkKey | None], *, reason: str = "", dirty: bool = False) -> bool:
        """Evict the chunk that `pick` names, or offer it to be written back first; False if there is none, or it stays.

        pick: called with the lock held. dirty: evict a dirty chunk without offering it.
        """
        with self._lock:
            key = pick()
            if key is None:
                return False
            held = self._index.entries[key]
            if held.dirty and not dirty:
                loaded = self.write_back.begin(key, held)
            else:
                loaded = None
                self._index.forget(key)
        if loaded is not None:
            return self.write_back.offer(key, held, loaded, leave=reason)
        held.block.drop()
        self._report("evicted", held, held.leaving or reason or "capacity")
        if held.dirty:
            self._report("dropped", held, "evicted before it was written")
        return True

    def _report(self, name: EventName, held: MemoryEntry, reason: str) -> None:
        self._events.emit(Event(name, self.name, held.chunk.num_tokens, 1, held.block.size, reason=reason))

    def _tell(self, key: ChunkKey, held: bool) -> None:
        (self._events.came if held else self._events.left)(self.name, [key], in_memory=True)

    # -- writing back --------------------------------------------------------------------------------------------------

    def write_back_all(self, until: float) -> bool:
        """Offer every dirty chunk to the stored tiers, the most recently used first, and wait for room in their queues
        until `until`. Returns whether all are being written, or never will be.
        """
        if self.write_back.write is None:
            return True
        for key in reversed(self.chunks()):
            while (held := self._index.entries.get(key)) is not None and held.dirty:
                freed = self.pool.times_freed
                if self._evict(partial(self._index.if_dirty, key)):
                    break
                if self._runtime.now() >= until:
                    return False
                self.pool.wait_for_room(until, freed)
        return True

    def _write_ahead(self, cold_bytes: int) -> None:
        """Have the coldest chunks written until `cold_bytes` are clean or being written, or the queue is full."""
        dirty = self.write_back.coldest(cold_bytes)
        while self._evict(dirty):
            pass

    # -- the seed's interface ------------------------------------------------------------------------------------------

    def _close(self) -> None:
        with self._lock:
            lost = [held for held in self._index.entries.values() if held.dirty]
        for held in lost:
            self._report("dropped", held, "closed before it was written")
        self.remove(self.chunks())

    def _take(self, key: ChunkKey) -> Loaded | None:
        loaded = self.lease([key])[0]
        self.touch([key])
        return loaded

    def _accept(self, key: ChunkKey, tensor: torch.Tensor) -> ChunkKey | None:
        self._check(tensor)
        if self.find([key], exact=True)[0]:
            return key
        reservation = self.reserve(self.layout.nbytes(tensor.shape))
        if reservation is None:
            return None
        chunk = self._blob_chunk(tensor, reservation.tensor(tensor.shape, self.layout.dtype))
        block = reservation.seal()
        assert block is not None
        self.insert(key, chunk, block).release()
        return key

    def _settled(self, token: ChunkKey) -> bool:
        return self.contains(token)
