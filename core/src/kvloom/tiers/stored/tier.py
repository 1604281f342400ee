"""A stored tier: any backend, made a cache level by a serializer, the envelope, a ledger and bounded threads."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvloom.bounded import one_line
from kvloom.contracts.observer import Event
from kvloom.contracts.serializer import Serializer
from kvloom.contracts.storage import StorageBackend
from kvloom.errors import BackendError, CorruptBlobError, DeadlineExceeded, UnreadableBlobError
from kvloom.format import envelope
from kvloom.format.encryption import Protection
from kvloom.interrupts import shielded_waiting
from kvloom.runtime import Call, Runtime
from kvloom.telemetry.events import EventBus
from kvloom.telemetry.request_trace import NO_TRACE, RequestTrace
from kvloom.tiers.chain import NO_CHAIN, Chain
from kvloom.tiers.index.existence_cache import ExistenceCache
from kvloom.tiers.index.ledger import Ledger
from kvloom.tiers.memory.tier import MemoryTier
from kvloom.tiers.request_context import RequestContext
from kvloom.tiers.stored.calls import Calls
from kvloom.tiers.stored.existence import Existence, Inquiry, Question
from kvloom.tiers.stored.inflight import Wanted
from kvloom.tiers.stored.load import Loads
from kvloom.tiers.stored.maintenance import Maintenance
from kvloom.tiers.stored.mapped import MappedChunks
from kvloom.tiers.stored.read import BlobReader
from kvloom.tiers.stored.removal import Removal
from kvloom.tiers.stored.write import BlobWriter
from kvloom.tiers.stored.write_queue import MOST_BATCH_BYTES, Write, WriteQueue, WriteTold
from kvloom.tiers.tier import Layout, Loaded, Tier
from kvloom.types import Chunk, ChunkKey, TierHealth

log = logging.getLogger(__name__)

BELIEVED_SECONDS = 30.0
"""Default of `remember`: seconds for which a store that may lose blobs is believed to have what it had."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of a stored tier from the config."""

    capacity: int | None = None
    deadline: float = 10.0
    write: str = "through"
    """`through`, `on_evict` or `never`."""
    admission: str = "lru"
    """`lru` or `tiny_lfu`."""
    ttl: float | None = None
    quota: Mapping[str, int] | None = None
    """Bytes by salt tag; `*` for the others."""
    exact_only: bool = False
    remember: float | None = None
    """For how many seconds an answer about keys is taken for granted, if not as long as it is by default."""
    protection: Protection | None = None
    """Keys that sign or encrypt blobs."""

    @property
    def bounded(self) -> bool:
        """There is a bound that kvloom has to keep."""
        bounds = self.capacity is not None or self.ttl is not None or bool(self.quota)
        return bounds and self.write != "never"


class StoredTier(Tier):
    """Blobs in a storage backend.

    Every call of the backend runs on one of the tier's threads and is waited for until the tier's deadline at most.
    Nothing that the backend raises leaves this class: it is counted, reported and served as a miss.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        backend: StorageBackend,
        serializers: Sequence[Serializer],
        memory: MemoryTier,
        events: EventBus,
        runtime: Runtime,
        *,
        policy: Policy,
        dst_device: str = "cpu",
    ) -> None:
        """serializers: the one to encode with, then others that blobs found in the store may be decoded with."""
        super().__init__(name, layout, dst_device=dst_device)
        self.backend = backend
        self.policy = policy
        self.deadline = policy.deadline
        self.serializer = serializers[0]
        self.calls = Calls(name, backend, events, runtime, deadline=policy.deadline)
        self.ledger = Ledger(
            runtime, capacity=policy.capacity, policy=policy.admission, ttl=policy.ttl, quota=policy.quota,
            believed=(policy.remember or BELIEVED_SECONDS) if backend.shared or backend.bounded else None,
        )  # fmt: skip
        reader = BlobReader(
            layout, serializers, memory, runtime, exact_only=policy.exact_only, ttl=policy.ttl,
            protection=policy.protection, name=name,
        )  # fmt: skip
        self._reader = reader
        self.outlived = reader.outlived
        """Return whether KV first stored at a time, in seconds since the epoch, has expired for this tier."""
        self._memory = memory
        self._events = events
        self._runtime = runtime
        self._invalidations = memory.invalidations
        self._record: Call[None] | None = None
        self._mapped = MappedChunks(backend, reader.mapped, reader.longest, reader.outlived, events, runtime, name=name)
        self.maintenance = Maintenance(
            name, backend, self.ledger, self.calls, events, runtime, bounded=policy.bounded,
            on_evicted=memory.write_back.lost_below if policy.write == "on_evict" else lambda keys: None,
            on_round=self._mapped.sweep,
        )  # fmt: skip
        self._existence = Existence(
            backend, self.ledger, self.calls, lossless=self.serializer.lossless, exact_only=policy.exact_only,
            expired=reader.expired, ttl=policy.ttl is not None, protection=policy.protection,
            remembered=ExistenceCache(policy.remember or 0.0, runtime.now),
            doomed=lambda: self._writer.doomed().union(self.maintenance.owed), sized=policy.bounded,
        )  # fmt: skip
        self.calls.on_doubt = self._existence.doubt
        self.loads = Loads(
            layout, backend, reader, self._existence, self.ledger, self.calls, memory, self._mapped, events, runtime,
            deletes=policy.write != "never",
        )  # fmt: skip
        self._writer = BlobWriter(
            backend, self.serializer, self.ledger, self.maintenance, memory.invalidations, events, runtime,
            protection=policy.protection, name=name,
        )  # fmt: skip
        self._removal = Removal(name, backend, self.ledger, self.maintenance, self.calls, events)
        bounds = [policy.capacity, *(policy.quota or {}).values()]
        self._writes = WriteQueue(
            self.calls.writes,
            runtime,
            deadline=policy.deadline,
            max_bytes=memory.pool.capacity // 2,
            # What is being written is nobody's victim: it is to be a small part of what a bound allows.
            batch_bytes=min(
                [MOST_BATCH_BYTES * self._writer.batches, *(bound // 8 for bound in bounds if bound is not None)]
            ),
            store=self._store,
            on_accepted=lambda write: self.ledger.expect(write.key, write.chain),
            on_lost=lambda write, reason: self._on_lost(write.key, write.loaded.chunk, reason),
            on_late=lambda: self.calls.failed("put", DeadlineExceeded("overdue"), self.calls.writing),
        )

    # -- finding -------------------------------------------------------------------------------------------------------

    @shielded_waiting
    def find(self, keys: Sequence[ChunkKey], context: RequestContext | None = None) -> list[bool]:
        """Return which keys the tier should hold in a form that this engine can use; none while it is paused."""
        self._check_here()
        return self._existence.find(keys, context or self._context())

    def find_within(self, keys: Sequence[ChunkKey], context: RequestContext, share: float) -> list[bool]:
        return self.seek(keys, context).answer(share * self.deadline)

    def seek(self, keys: Sequence[ChunkKey], context: RequestContext) -> Question:
        """Begin `find`, for whoever has something else to do until the store has answered."""
        self._check_here()
        return self._existence.seek(keys, context)

    def may_hold(self, key: ChunkKey) -> bool:
        """Return whether it is worth reading a key, as far as is known here and now."""
        return self._existence.may_hold(key)

    def inquire(self, keys: Sequence[ChunkKey], context: RequestContext) -> Inquiry | None:
        """Begin to find out of which keys the store has enough; None if nothing at all is to be written now."""
        if self.policy.write == "never" or self._writes.stuck or self.calls.write_paused or self._may_not_grow:
            return None
        return self._existence.inquire(keys, context, ignore=self._writes.pending)

    def satisfied(self, keys: Sequence[ChunkKey], inquiry: Inquiry) -> list[bool]:
        """For which keys an exact chunk need not be written, as far as is known: there, on its way, or unwelcome."""
        enough, pending = inquiry.enough_of(keys), self._writes.pending
        return [here or pending(key) or not self._welcome(key) for here, key in zip(enough, keys, strict=True)]

    def lacks(self, key: ChunkKey, written: float) -> bool:
        """Return whether, as far as is known here, a chunk should be written when memory lets go of it.

        written: as `outlived` takes it.
        """
        if self._writes.stuck or self.calls.write_paused or self._may_not_grow:
            return False
        if self._writes.pending(key) or self.outlived(written):
            return False
        return not self._existence.known_enough([key])[0] and self._welcome(key)

    def has_room(self, nbytes: int) -> bool:
        """Return whether a write would be accepted without waiting."""
        return self._writes.has_room(nbytes)

    @shielded_waiting
    def contains(self, key: ChunkKey) -> bool:
        self._check_here()
        return self._writes.pending(key) or self.find([key])[0]

    def has_enough(self, key: ChunkKey) -> bool:
        """Return whether, as far as is known here, there is nothing better to be written, or it is on its way."""
        return self._writes.pending(key) or self._existence.known_enough([key])[0]

    def touch(self, chain: Sequence[ChunkKey], *, count: bool = True) -> None:
        """Note that a chain was used. count: once more than before."""
        if self.policy.bounded or self.backend.bounded:
            self.ledger.touch(chain, count=count)

    # -- writing -------------------------------------------------------------------------------------------------------

    def submit(
        self, key: ChunkKey, loaded: Loaded, *, until: float, since: int, chain: Chain = NO_CHAIN,
        record: RequestTrace = NO_TRACE, inquiry: Inquiry | None = None,
    ) -> Write | None:  # fmt: skip
        """Write an exact chunk in the background, taking over its lease; None (and counted) if it was dropped.

        since: a mark of the removals from before the chunk was got; what was removed after it is not kept.
        chain: what it is part of; nothing of it makes room for what is behind it. record: where it is noted.
        inquiry: it is written only if the store turns out not to have enough of it.
        """
        chunk = loaded.chunk
        assert chunk.exact, "lossy chunks are never written on: they would be encoded twice"
        if self.calls.writing.open and not self.calls.writing.take_probe():
            loaded.release()
            self._on_lost(key, chunk, "the tier is paused")
            return None
        write = self._writes.submit(
            Write(key, loaded, since=since, chain=chain, record=record, inquiry=inquiry), until=until
        )
        if write is None:
            self._on_lost(key, chunk, "the write queue is full")
        return write

    @shielded_waiting
    def flush(self, until: float) -> bool:
        """Wait until every accepted write has been written or has failed; False if `until` came first."""
        return self._writes.flush(until)

    def _store(self, writes: Sequence[Write], told: WriteTold) -> None:
        """On the tier's thread: write them, as far as the tier may."""
        if self._may_not_grow:
            for number in range(len(writes)):
                told(number, "the tier is degraded")
            return
        failed: list[tuple[int, str]] = []

        def write() -> None:
            error = self._writer.write(writes, told, failed)
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # else it would be in a cycle with this frame, and hold what its traceback refers to

        try:
            self.calls.judged("put", write, self.calls.writing)()
        finally:
            for number, why in failed:
                told(number, why)

    def _on_lost(self, key: ChunkKey, chunk: Chunk, reason: str) -> None:
        self.ledger.forget_pending(key)
        self._events.emit(Event("dropped", self.name, chunk.num_tokens, 1, chunk.nbytes, reason=reason))

    # -- operator's verbs ----------------------------------------------------------------------------------------------

    @shielded_waiting
    def remove(self, keys: Sequence[ChunkKey]) -> None:
        """Delete blobs; they are gone on return. Raises BackendError if that cannot be said."""
        self._writes.flush(self._runtime.now() + self.deadline)
        self._removal.remove(keys)

    @shielded_waiting
    def clear(self, prefix: str) -> None:
        """Delete every blob whose key starts with `prefix`, a beginning of `<fingerprint>/<salt tag>/`; as `remove`."""
        self._writes.flush(self._runtime.now() + self.deadline)
        self._removal.clear(prefix)

    def put_record(self, name: str, content: bytes) -> None:
        """Keep a small unframed record beside the blobs, in the background."""
        if self.policy.write == "never" or not self.backend.persistent:
            return
        try:
            self._record = self.calls.chore("put", lambda: self.backend.put(name, [content]), seconds=self.deadline)
        except BackendError as error:
            self.calls.report("put", error)

    def _close(self) -> None:
        self.maintenance.close()
        self._writes.close(self._runtime.now() + self.deadline)
        if self._record is not None:
            self._record.wait()
        self.maintenance.finish()
        self.calls.close()
        self._reader.close()
        self._mapped.close()

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def abandoned_calls(self) -> int:
        """Backend calls past their deadline that have not returned yet."""
        return self.calls.abandoned

    @shielded_waiting
    def health(self) -> TierHealth:
        """State of the tier as known here; the backend is not asked."""
        self._check_here()
        calls = self.calls
        breaker = calls.reading if calls.reading.open else calls.writing
        state = "stuck" if calls.stuck else "paused" if calls.reading.open else "ok"
        hangs = self.maintenance.hangs
        if state == "ok" and calls.writing.open:
            state = "read only"
        if state == "ok" and hangs:
            state = "neglected"
        reason = calls.last_error or "upkeep: no answer"
        if state == "ok" and (degraded := self.maintenance.unlisted or self.maintenance.shut_out):
            state, reason = "degraded", degraded
        return TierHealth(
            self.name,
            state,
            reason="" if state == "ok" else reason,
            retry_in_seconds=max(0.0, breaker.probe_at - self._runtime.now()) if breaker.open else None,
            failures=max(calls.reading.failures, calls.writing.failures),
            abandoned_calls=calls.abandoned + hangs,
            waiting_bytes=self._writes.waiting_bytes,
            blobs=len(self.ledger),
            bytes=self.ledger.bytes,
            capacity=self.policy.capacity,
            recovered=self.ledger.complete,
            evicts=self.maintenance.evicts,
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _may_not_grow(self) -> bool:
        """True if the tier has a bound and its content is not known."""
        return bool(self.maintenance.unlisted) and (self.policy.capacity is not None or bool(self.policy.quota))

    def _context(self) -> RequestContext:
        return RequestContext(self._runtime, self.deadline, since=self._invalidations.mark())

    def _welcome(self, key: ChunkKey) -> bool:
        blobs = len(self.ledger)
        return self.ledger.welcome(key, self.ledger.bytes // blobs if blobs else 0)

    # -- the seed's interface ------------------------------------------------------------------------------------------

    def _take(self, key: ChunkKey) -> Loaded | None:
        context = self._context()
        if not self._writes.flush_one(key, context.until):
            return None
        header = self.calls.ask("get", lambda: self._header_or_none(key), context)
        # Nobody said of which shape it should be: of one that cannot be in memory, it is no chunk.
        if header is None or not self._fits(header.description.shape):
            return None
        read = self.loads.read(Wanted(key, header.description.shape, header.description.num_tokens), context)
        return None if read is None else self.loads.collect(read)

    def _fits(self, shape: Sequence[int]) -> bool:
        return len(shape) <= 8 and math.prod(shape) * self.layout.dtype.itemsize <= self._memory.pool.capacity

    def _header_or_none(self, key: ChunkKey) -> envelope.Header | None:
        try:
            return self._existence.header(key)
        except (CorruptBlobError, UnreadableBlobError) as error:
            log.info("tier=%s a blob of no use here: %s", self.name, one_line(error))
            reason = "corrupt" if isinstance(error, CorruptBlobError) else "unreadable"
            self._events.emit(Event("missed", self.name, chunks=1, reason=reason))
            return None

    def _accept(self, key: ChunkKey, tensor: torch.Tensor) -> Write | None:
        self._check(tensor)
        if self.policy.write == "never":
            return None
        until, since = self._runtime.now() + self.deadline, self._invalidations.mark()
        reservation = self._memory.reserve_by(self.layout.nbytes(tensor.shape), until)
        block = None
        if reservation is not None:
            chunk = self._blob_chunk(tensor, reservation.tensor(tensor.shape, self.layout.dtype))
            block = reservation.seal()
        if block is None:
            return None
        loaded = Loaded(chunk, block.lease(), self._runtime.wall())
        block.drop()
        return self.submit(key, loaded, until=until, since=since)

    def _settled(self, token: Write) -> bool:
        return self._writes.wait(token, self._runtime.now() + self.deadline)
