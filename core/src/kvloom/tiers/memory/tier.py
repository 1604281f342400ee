"""The memory tier: sealed raw chunks in the pool, handed out by lease, least recently used out first."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from kvloom.tiers.request_context import RequestContext
from kvloom.tiers.tier import Layout, Loaded, Tier
from kvloom.types import Chunk, ChunkKey, TierHealth

log = logging.getLogger(__name__)

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

    write_back: Callable[[ChunkKey, Loaded], bool | None] | None = None
    """Takes an exact chunk on before it is evicted. Called without a lock held; must not wait, nor call this tier.

    True: it is being written, and the lease is the callee's. None: not now, the queue is full. False: it never will be.
    With None and False the lease stays the tier's. Set it before the first insert.
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
        self._held = MemoryIndex(ttl=ttl, quota=quota, told=self._tell if events.sees_chunks else None)
        # Keys that `write_back` is being asked about: whoever removes one waits for the answer.
        self._offered: list[ChunkKey] = []
        self._answered = runtime.condition()

    def after_fork_in_child(self, pid: int) -> None:
        super().after_fork_in_child(pid)
        self._lock, self._answered = self._runtime.lock(), self._runtime.condition()
        self._held = MemoryIndex()  # what the chunks were in is not the child's

    def __len__(self) -> int:
        return len(self._held.entries)

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
        entries = self._held.entries
        with self._lock:
            if self._held.ttl is not None:
                after = self._runtime.wall() - self._held.ttl
                return [
                    (held := entries.get(key)) is not None and held.written > after and (held.chunk.exact or not exact)
                    for key in keys
                ]
            if not exact:
                return [key in entries for key in keys]
            return [(held := entries.get(key)) is not None and held.chunk.exact for key in keys]

    def has_all(self, keys: Sequence[ChunkKey]) -> bool:
        """Return whether every key is held; takes no lock, and says no where keys expire."""
        return self._held.ttl is None and all(map(self._held.entries.__contains__, keys))

    @shielded_waiting
    def contains(self, key: ChunkKey) -> bool:
        self._check_here()
        return key in self._held.entries if self._held.ttl is None else self.find([key])[0]

    def lease(self, keys: Sequence[ChunkKey]) -> list[Loaded | None]:
        """The chunks of `keys`, each leased, or None where there is none."""
        entries = self._held.entries
        origin = caller()
        after = -math.inf if self._held.ttl is None else self._runtime.wall() - self._held.ttl
        with self._lock:
            found = [None if (held := entries.get(key)) is None or held.written <= after else held for key in keys]
            # Leased under the lock: between the look and the lease nobody may evict.
            leases = iter(lease_all([held.block for held in found if held is not None], origin))
        return [None if held is None else Loaded(held.chunk, next(leases), held.written) for held in found]

    def touch(self, chain: Sequence[ChunkKey]) -> None:
        """Note that a chain was used: its head becomes the most recent, its tail the least."""
        with self._lock:
            self._held.touch(chain)

    @shielded_waiting
    def chunks(self) -> list[ChunkKey]:
        """The keys held, least recently used first, the pinned ones last."""
        with self._lock:
            return self._held.keys()

    @shielded_waiting
    def changes(self) -> Changes:
        """Return the chunks that came and left since the last call, for a mirror of this tier. One caller only."""
        with self._lock:
            return self._held.changes()

    # -- keeping -------------------------------------------------------------------------------------------------------

    def insert(
        self, key: ChunkKey, chunk: Chunk, block: Block, *, written: float | None = None, dirty: bool = True,
        since: int | None = None, chain: Chain = NO_CHAIN,
    ) -> Loaded:  # fmt: skip
        """Keep a sealed chunk and lease it. An exact one replaces a lossy one, never the other way round.

        written: when it was first stored, in seconds since the epoch, if that was not now. dirty: it is to be written
        back before it is evicted, if there is a `write_back`. since: a mark of `invalidations` from before it was read;
        what was removed after it is not kept. chain: what it is part of; it does not take its salt's room from what is
        before it.
        """
        wall = self._runtime.wall()
        fresh, dirty = dirty, dirty and chunk.exact and self.write_back is not None
        new = MemoryEntry(chunk, block, wall if written is None else min(written, wall), dirty)
        if self.write_back is not None:
            new.chain = chain
        since = self.invalidations.mark() if since is None else since
        loaded = self._keep(key, new, wall, since, chain, fresh=fresh)
        if self._held.restless:
            for _ in range(_SWEPT_EACH_TIME):
                self._let_go(partial(self._held.due, wall), reason="expired")
        if self.write_back is not None:
            clean_bytes = max(self.pool.capacity // _CLEAN_PART, block.size)
            self._write_ahead(clean_bytes - self.pool.free_bytes)
        return loaded

    def _keep(self, key: ChunkKey, new: MemoryEntry, wall: float, since: int, chain: Chain, *, fresh: bool) -> Loaded:
        kept = self.keep and not self._held.expired(new, wall)
        while True:
            with self._lock:
                gone = self.invalidations.hit(key, since)
                settled = self._settle(key, new, wall, kept=kept and not gone)
            if settled is not None:
                break
            kept = self._let_go(partial(self._coldest_of_tenant, key, chain), reason="quota")
            if not kept and chain and fresh and not new.dirty:
                self._report("dropped", new, "over its salt's quota")
        loaded, surplus = settled
        if surplus is new.block and new.dirty and loaded.chunk is new.chunk and not gone:
            self._pass_on(key, loaded)
        if surplus is not None:
            surplus.drop()
        return loaded

    def _coldest_of_tenant(self, key: ChunkKey, chain: Chain) -> ChunkKey | None:
        coldest = self._held.coldest_of_tenant(key)
        return None if coldest is None or chain.leads_to(key, coldest.digest) else coldest

    def _settle(
        self, key: ChunkKey, new: MemoryEntry, wall: float, *, kept: bool
    ) -> tuple[Loaded, Block | None] | None:
        """Return the chunk of two that stays, leased, and the other block; None if the tenant must make room first."""
        origin = new.block.origin  # where it was reserved says enough about who inserts it
        present = self._held.entries.get(key)
        if (
            present is not None
            and (present.chunk.exact or not new.chunk.exact)
            and not (present.leaving or self._held.expired(present, wall))
        ):
            return Loaded(present.chunk, present.block.lease(origin), present.written), new.block
        if kept and not self._held.fits(key, new.block.size):
            return None
        loaded = Loaded(new.chunk, new.block.lease(origin), new.written)
        if not kept:
            return loaded, new.block
        if present is not None:
            self._held.forget(key)
            new.pinned = present.pinned
        self._held.add(key, new)
        return loaded, None if present is None else present.block

    @shielded_waiting
    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> int:
        """Keep chunks from being evicted, or allow it again; how many are held."""
        # From the tail, so that a head that is unpinned is more recent than its tail.
        return sum(self._pin(key, pinned) for key in reversed(list(keys)))

    def _pin(self, key: ChunkKey, pinned: bool) -> bool:
        while True:
            with self._lock:
                held = self._held.pin(key, pinned, self._runtime.wall())
            if held is not None:
                return held
            if not self._let_go(partial(self._held.coldest_of_tenant, key), reason="quota"):
                return False

    @shielded_waiting
    def remove(self, keys: Iterable[ChunkKey]) -> int:
        """Forget chunks, pinned ones too; how many there were.

        On return nobody is being asked to write them any more: whoever deletes them below next, deletes them all.
        """
        doomed = list(keys)
        with self._lock:
            entries = [held for key in doomed if (held := self._held.forget(key)) is not None]
        for held in entries:
            held.block.drop()
        if self._offered:
            self._await_answers(frozenset(doomed))
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
            if self.write_back is None or not self._let_go(partial(self._held.recency.coldest, dirty=True), dirty=True):
                return None
        return reservation

    def _may_get(self, nbytes: int) -> bool:
        """Return whether waiting can help: something in use, other than what is pinned, is still to be given back."""
        pinned = self._held.pinned_bytes
        return nbytes <= min(self.pool.capacity - pinned, self.pool.largest_bytes) and self.pool.used_bytes > pinned

    def _make_room(self, nbytes: int, evicted: int) -> bool:
        if evicted >= _SCATTERED and self._widen_gap():
            return True
        return self._evict_one() or self._clean_and_evict(nbytes)

    def _widen_gap(self) -> bool:
        """Evict what lies beside the widest gap, as going on by age would empty memory all over for one long piece."""
        return self._let_go(partial(self._held.beside, *self.pool.widest))

    def _evict_one(self) -> bool:
        if self._held.restless and self._let_go(partial(self._held.due, self._runtime.wall()), reason="expired"):
            return True
        recency = self._held.recency
        return self._let_go(recency.coldest) or self._let_go(recency.coldest_aside)

    def _clean_and_evict(self, nbytes: int) -> bool:
        if self.write_back is None:
            return False
        self._write_ahead(
            self._held.recency.aside_bytes + max(self.pool.capacity // _CLEAN_PART, self.pool.taken_by(nbytes))
        )
        return self._let_go(self._held.recency.coldest)

    def _let_go(self, pick: Callable[[], ChunkKey | None], *, reason: str = "", dirty: bool = False) -> bool:
        """Evict the chunk that `pick` names, or offer it to be written back first; whether either came about.

        dirty: evict it, written or not.
        """
        with self._lock:
            key = pick()
            if key is None:
                return False
            held = self._held.entries[key]
            if held.dirty and not dirty:
                held.dirty = False
                self._offered.append(key)
                loaded = Loaded(held.chunk, held.block.lease(), held.written, held.chain)
            else:
                loaded = None
                self._held.forget(key)
        if loaded is not None:
            return self._offer(key, held, loaded, leave=reason)
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
        """Offer every dirty chunk to `write_back`, the most recently used first, waiting for its queue until `until`.

        Whether all were taken on or refused for good.
        """
        if self.write_back is None:
            return True
        for key in reversed(self.chunks()):
            while (held := self._held.entries.get(key)) is not None and held.dirty:
                freed = self.pool.times_freed
                if self._let_go(partial(self._held.if_dirty, key)):
                    break
                if self._runtime.now() >= until:
                    return False
                self.pool.wait_for_room(until, freed)
        return True

    def lost_below(self, keys: Iterable[ChunkKey]) -> None:
        """The tier below has evicted these: what memory has of them is to be written again when it lets go."""
        with self._lock:
            for key in keys:
                held = self._held.entries.get(key)
                if held is not None and held.chunk.exact and not held.dirty and not held.leaving:
                    self._held.still_dirty(key, held)

    def _write_ahead(self, cold_bytes: int) -> None:
        """Have the coldest chunks written until `cold_bytes` are clean or on their way, or the queue is full.

        Each once: where the tier below has room for less, it evicts one for the other, which is to be written again.
        """
        seen: set[ChunkKey] = set()

        def unseen() -> ChunkKey | None:
            key = self._held.recency.coldest_dirty(cold_bytes)
            if key is None or key in seen:
                return None
            seen.add(key)
            return key

        while self._let_go(unseen):
            pass

    def _offer(self, key: ChunkKey, held: MemoryEntry, loaded: Loaded, *, leave: str) -> bool:
        verdict = self._ask(key, loaded)
        with self._lock:
            self._offered.remove(key)
            if verdict is None:
                self._held.still_dirty(key, held)
            elif verdict and leave:
                self._held.leave(key, held, leave)
        with self._answered:
            self._answered.notify_all()
        return verdict is not None

    def _pass_on(self, key: ChunkKey, loaded: Loaded) -> None:
        """Offer a chunk that memory does not keep."""
        if self._ask(key, loaded.again()) is None:
            chunk, reason = loaded.chunk, "not kept in memory, and no room to write it"
            self._events.emit(Event("dropped", self.name, chunk.num_tokens, 1, chunk.nbytes, reason=reason))

    def _ask(self, key: ChunkKey, loaded: Loaded) -> bool | None:
        """Return the answer of `write_back`; the lease is released unless it took it."""
        assert self.write_back is not None
        verdict = None
        try:
            verdict = self.write_back(key, loaded)
        except Exception:  # whoever stores or retrieves has nothing to do with it
            log.exception("tier=%s a chunk could not be handed on", self.name)
        finally:
            if verdict is not True:
                loaded.release()
        return verdict

    def _await_answers(self, keys: Collection[ChunkKey]) -> None:
        until = self._runtime.now() + self.deadline
        with self._answered:
            while any(key in keys for key in tuple(self._offered)):
                left = until - self._runtime.now()
                if left <= 0:
                    return
                self._answered.wait(left)

    # -- the seed's interface ------------------------------------------------------------------------------------------

    def _close(self) -> None:
        with self._lock:
            lost = [held for held in self._held.entries.values() if held.dirty]
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
