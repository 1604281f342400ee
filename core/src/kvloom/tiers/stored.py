"""A stored tier: any backend, made a cache level by a serializer, the envelope, a ledger and bounded threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from kvloom import envelope
from kvloom.contracts.observer import Event
from kvloom.contracts.serializer import Serializer
from kvloom.contracts.storage import StorageBackend
from kvloom.errors import BackendError, CorruptBlobError, DeadlineExceeded, LaterVersionError, UnreadableBlobError
from kvloom.events import EventBus
from kvloom.runtime import Call, Runtime
from kvloom.tiers.arrivals import Arrival, Arrivals, Arrived, WholeRead
from kvloom.tiers.base import Layout, Loaded, Tier
from kvloom.tiers.blobs import BlobWriter
from kvloom.tiers.calls import Calls, NoRoomError
from kvloom.tiers.chain import NO_CHAIN, Chain
from kvloom.tiers.flights import Flights, Read, release
from kvloom.tiers.layer_blobs import LayeredBlob, layered, read_layers
from kvloom.tiers.ledger import Fidelity, Ledger
from kvloom.tiers.memory import MemoryTier
from kvloom.tiers.presence import Presence
from kvloom.tiers.reader import BlobReader, ExpiredBlobError
from kvloom.tiers.rooms import Place
from kvloom.tiers.upkeep import Upkeep
from kvloom.tiers.visit import Visit
from kvloom.tiers.writes import Write, WriteQueue
from kvloom.types import Chunk, ChunkKey, TierHealth

log = logging.getLogger(__name__)
T = TypeVar("T")

QUARANTINE = "quarantine/"
"""Where `kvloom scrub` puts corrupt blobs, under their keys."""
OPERATOR_SECONDS = 60.0
"""How long an operator's verb may take, if the deadline is shorter: it may have many blobs to delete."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the config says about a stored tier."""

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
            runtime, capacity=policy.capacity, policy=policy.admission, ttl=policy.ttl, quota=policy.quota
        )
        self._reader = BlobReader(layout, serializers, memory, runtime, exact_only=policy.exact_only, ttl=policy.ttl)
        self._memory = memory
        self._events = events
        self._runtime = runtime
        self._purges = memory.purges
        self._record: Call[None] | None = None
        self._flights = Flights(self.calls, runtime)
        self.arrivals = Arrivals(self._flights, self.calls, memory.purges, layout, runtime, self.read_layers)
        self._writes = WriteQueue(
            self.calls.writes,
            runtime,
            deadline=policy.deadline,
            max_bytes=memory.pool.capacity // 2,
            on_lost=lambda write, reason: self._on_lost(write.key, write.loaded.chunk, reason),
            on_late=lambda: self.calls.failed("put", DeadlineExceeded("overdue"), self.calls.writing),
        )
        self.upkeep = Upkeep(
            name, backend, self.ledger, self.calls, events, runtime, bounded=policy.bounded,
            on_evicted=memory.lost_below if policy.write == "on_evict" else lambda keys: None,
        )  # fmt: skip
        self._presence = Presence(
            backend, self.ledger, self.calls, lossless=self.serializer.lossless, exact_only=policy.exact_only,
            expired=self._reader.expired, ttl=policy.ttl is not None,
        )  # fmt: skip
        self._writer = BlobWriter(backend, self.serializer, self.ledger, self.upkeep)

    # -- finding -------------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[ChunkKey], visit: Visit | None = None) -> list[bool]:
        """Which keys the tier is believed to hold in a form that this engine can use; none while it is paused."""
        self._check_here()
        return self._presence.find(keys, visit or self._visit())

    def satisfied(self, keys: Sequence[ChunkKey], visit: Visit | None = None) -> list[bool]:
        """For which keys an exact chunk need not be written: there, on its way, unwelcome, or no writing at all now."""
        if self.policy.write == "never" or self._writes.stuck or self.calls.write_paused:
            return [True] * len(keys)
        pending = self._writes.pending
        enough = self._presence.enough(keys, visit or self._visit(), ignore=pending)
        return [here or pending(key) or not self._welcome(key) for here, key in zip(enough, keys, strict=True)]

    def lacks(self, key: ChunkKey, written: float) -> bool:
        """Whether, as far as is known here and now, a chunk should be written when memory lets go of it.

        written: as `outlived` takes it.
        """
        if self._writes.stuck or self.calls.write_paused or self._writes.pending(key) or self.outlived(written):
            return False
        return not self._presence.known_enough([key])[0] and self._welcome(key)

    def outlived(self, written: float) -> bool:
        """Whether the tier has no use for KV that was first stored at `written`, in seconds since the epoch."""
        return self._reader.outlived(written)

    def has_room(self, nbytes: int) -> bool:
        """Whether a write would be accepted without waiting."""
        return self._writes.has_room(nbytes)

    def contains(self, key: ChunkKey) -> bool:
        self._check_here()
        return self._writes.pending(key) or self.find([key])[0]

    def has_enough(self, key: ChunkKey) -> bool:
        """Whether, as far as is known here and now, there is nothing better to be written, or it is on its way."""
        return self._writes.pending(key) or self._presence.known_enough([key])[0]

    def touch(self, chain: Sequence[ChunkKey], *, count: bool = True) -> None:
        """Note that a chain was used. count: once more than before."""
        if self.policy.bounded:
            self.ledger.touch(chain, count=count)

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(
        self, key: ChunkKey, shape: Sequence[int], num_tokens: int, visit: Visit | None = None
    ) -> Read | WholeRead | None:
        """Begin to load a chunk into the pool; None if the tier cannot take the call. Collect with `collect`.

        Whoever asks for a chunk that is on its way already, whole or by layers, shares the calls that read it.
        """
        visit = visit or self._visit()
        return self._read(key, shape, num_tokens, visit, instead=partial(self.arrivals.share, key, visit))

    def fetch(
        self, key: ChunkKey, shape: Sequence[int], num_tokens: int, visit: Visit
    ) -> Loaded | Read | WholeRead | None:
        """`read`, unless somebody has just done so: then the chunk from memory."""

        def instead() -> Loaded | WholeRead | None:
            # What is no longer on its way was in memory before that, if it is to be had.
            return self.arrivals.share(key, visit) or (None if self._flights.under_way(key) else self._held(key))

        return self._read(key, shape, num_tokens, visit, instead=instead)

    def _held(self, key: ChunkKey) -> Loaded | None:
        return self._memory.lease([key])[0]

    def _read(
        self, key: ChunkKey, shape: Sequence[int], num_tokens: int, visit: Visit, *, instead: Callable[[], T | None]
    ) -> Read | T | None:
        if not self.calls.serves(visit):
            return None
        load = partial(self._load, key, tuple(shape), num_tokens, visit.chain)
        read = self._flights.board(key, load, visit, instead=instead)
        if isinstance(read, WholeRead):
            self.arrivals.hurry(read.arrival)
        return read

    def collect(self, read: Read | WholeRead) -> Loaded | None:
        """The verified chunk, or None: not there, not readable, or not in time."""
        return self._flights.leave(read) if isinstance(read, Read) else self._collect_layers(read)

    def give_up(self, read: Read | WholeRead) -> None:
        """Nobody will collect it."""
        if isinstance(read, Read):
            self._flights.give_up(read)
        else:
            self.arrivals.leave(read.arrival)

    def _collect_layers(self, read: WholeRead) -> Loaded | None:
        arrival = read.arrival
        key, num_tokens = arrival.key, arrival.num_tokens
        try:
            outcome = self.arrivals.collect(read)
            if outcome and self._purges.hit(key, arrival.since):
                return None
            if outcome:
                return self.complete(arrival, read.visit.chain)[0]
            self.arrivals.close(arrival)
        finally:
            self.arrivals.leave(arrival)
        if outcome is None or not self.calls.serves(read.visit):
            return None
        load = partial(self._load, key, arrival.place.chunk_shape, num_tokens, read.visit.chain)
        again = self._flights.board(key, load, read.visit)
        return None if again is None else self._flights.leave(again)

    def complete(self, arrival: Arrival, chain: Chain) -> tuple[Loaded, bool]:
        """The chunk, all of whose layers have come right, leased and in memory; and whether nobody else did this.

        chain: what it is part of.
        """
        loaded, block = self.arrivals.complete(arrival)
        if block is None:
            return loaded, False
        assert arrival.blob is not None
        header = arrival.blob.header
        nbytes, seconds = header.header_bytes + header.payload_bytes, self._runtime.now() - arrival.began
        self._events.emit(Event("retrieved", self.name, arrival.num_tokens, 1, nbytes, seconds))
        kept = self._memory.insert(
            arrival.key, loaded.chunk, block, written=loaded.written or None, dirty=False, since=arrival.since,
            chain=chain,
        )  # fmt: skip
        loaded.release()
        return kept, True

    def begin(self, read: Callable[[], T]) -> Call[T] | None:
        """Have a thread for reads run `read`, which reads part of a blob; None if the tier cannot take the call."""
        if self.calls.paused:
            return None
        try:
            judged = self.calls.judged("read", read, self.calls.reading)
            return self.calls.reads.submit(judged, seconds=self.deadline)
        except BackendError as error:
            self.calls.failed("read", error, self.calls.reading)
            return None

    def read_layers(
        self, key: ChunkKey, blob: LayeredBlob | None, place: Place, num_tokens: int, layers: range
    ) -> Arrived | None:
        """On the tier's thread: read some layers of a blob (None: what it is, is to be found out first) into `place`.

        0 layers if there is nothing that can be read by layers; None if nobody waits any more.
        """
        if not place.room.enter():
            return None
        try:
            blob = blob or self._open_layers(key, place.chunk_shape, num_tokens)
            return (None, 0) if blob is None else (blob, read_layers(self.backend, blob, place, layers))
        except CorruptBlobError:
            return blob, 0
        finally:
            place.room.release()

    def _open_layers(self, key: ChunkKey, shape: tuple[int, ...], num_tokens: int) -> LayeredBlob | None:
        known_since = self.ledger.mark()
        try:
            header = self._presence.header(key)
            if header is None:
                return None
            serializer = self._reader.check(header, shape, num_tokens)
        except (CorruptBlobError, UnreadableBlobError, ExpiredBlobError):
            return None  # reading it whole says so, and does what is to be done about it
        self._presence.note(key, header, since=known_since)
        empty = torch.empty(shape, dtype=self.layout.dtype, device="meta")
        return layered(header, serializer, Chunk(empty, self.layout.format, num_tokens, header.description.fidelity))

    def _load(self, key: ChunkKey, shape: tuple[int, ...], num_tokens: int, chain: Chain) -> Loaded | None:
        began = self._runtime.now()
        since, known_since = self._purges.mark(), self.ledger.mark()
        until = began + self.deadline
        for attempt in (1, 2):
            try:
                arrived = self._reader.read(
                    self.backend, key, shape, num_tokens, until=until, since=since, chain=chain,
                    on_wait=partial(self._flights.starve, key),
                )  # fmt: skip
            except (UnreadableBlobError, ExpiredBlobError, NoRoomError) as error:
                self._miss(key, num_tokens, error, since=known_since)
                return None
            except CorruptBlobError as error:
                if attempt == 2:
                    self._discard(key, num_tokens, error)
                continue
            if arrived is None:
                self.ledger.forget_absent(key)
                return None
            header, loaded = arrived
            if self._purges.hit(key, since):
                release(loaded)
                return None
            self._presence.note(key, header, since=known_since)
            if loaded is not None:
                nbytes = header.header_bytes + header.payload_bytes
                self._events.emit(Event("retrieved", self.name, num_tokens, 1, nbytes, self._runtime.now() - began))
            return loaded
        return None

    def _miss(self, key: ChunkKey, num_tokens: int, error: Exception, *, since: int) -> None:
        reason = "no room in memory"
        if isinstance(error, UnreadableBlobError):
            reason = f"unreadable: {error}"
            later = isinstance(error, LaterVersionError)
            self.ledger.note(key, Fidelity.LATER if later else Fidelity.UNREADABLE, since=since)
        elif isinstance(error, ExpiredBlobError):
            reason = "expired"
            self._delete_one(key)
        self._events.emit(Event("missed", self.name, tokens=num_tokens, chunks=1, reason=reason))

    def _discard(self, key: ChunkKey, num_tokens: int, error: CorruptBlobError) -> None:
        log.warning("tier=%s removing a corrupt blob: %s", self.name, str(error))
        self._events.emit(Event("corrupt", self.name, tokens=num_tokens, chunks=1, reason=str(error)))
        self._delete_one(key)

    def _delete_one(self, key: ChunkKey) -> None:
        if self.policy.write != "never":  # else it is not ours to delete
            self.backend.delete(str(key))
        self.ledger.forget([key])

    # -- writing -------------------------------------------------------------------------------------------------------

    def submit(
        self, key: ChunkKey, loaded: Loaded, *, until: float, since: int, chain: Chain = NO_CHAIN
    ) -> Write | None:
        """Write an exact chunk in the background, taking over its lease; None (and counted) if it was dropped.

        since: a mark of the removals from before the chunk was got; what was removed after it is not kept.
        chain: what it is part of; nothing of it makes room for what is behind it.
        """
        chunk = loaded.chunk
        assert chunk.exact, "lossy chunks are never written on: they would be encoded twice"
        if self.calls.writing.open and not self.calls.writing.take_probe():
            loaded.release()
            self._on_lost(key, chunk, "the tier is paused")
            return None
        self.ledger.expect(key, chain)
        store = partial(self._store, key, loaded, since, chain)
        write = self._writes.submit(key, self.calls.judged("put", store, self.calls.writing), loaded, until=until)
        if write is None:
            self._on_lost(key, chunk, "the write queue is full")
        return write

    def flush(self, until: float) -> bool:
        """Wait until every accepted write has been written or has failed; False if `until` came first."""
        return self._writes.flush(until)

    def _store(self, key: ChunkKey, loaded: Loaded, since: int, chain: Chain) -> bool:
        began = self._runtime.now()
        chunk = loaded.chunk
        written = self._writer.write(key, loaded, chain=chain, removed=lambda: self._purges.hit(key, since))
        if not written.fits:
            self._on_lost(key, chunk, "no room within the tier's bounds, or just being deleted")
        elif not written.kept:
            self._on_lost(key, chunk, "removed while it was being written")
        if written.kept:
            seconds = self._runtime.now() - began
            self._events.emit(Event("stored", self.name, chunk.num_tokens, 1, written.nbytes, seconds))
        return written.kept

    def _on_lost(self, key: ChunkKey, chunk: Chunk, reason: str) -> None:
        self.ledger.forget_pending(key)
        self._events.emit(Event("dropped", self.name, chunk.num_tokens, 1, chunk.nbytes, reason=reason))

    # -- operator's verbs ----------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        """Delete blobs; they are gone on return. Raises BackendError if that cannot be said."""

        def delete() -> None:
            names = [str(key) for key in keys]
            try:
                self.backend.delete_many([*names, *(QUARANTINE + name for name in names)])
            except BaseException:
                self._forget_gone(keys)
                raise
            self.ledger.forget(keys)

        self._delete("remove", delete)

    def clear(self, prefix: str) -> None:
        """Delete every blob whose key starts with `prefix`, a beginning of `<fingerprint>/<salt tag>/`; as `remove`."""

        def delete() -> None:
            known = self.ledger.names(prefix)
            found = [entry.key for place in (prefix, QUARANTINE + prefix) for entry in self.backend.scan(place)]
            try:
                self.backend.delete_many([*dict.fromkeys([*found, *map(str, known)])])
            except BaseException:
                self._forget_gone(known)
                raise
            self.ledger.forget(known)

        self._delete("clear", delete)

    def _forget_gone(self, keys: Sequence[ChunkKey]) -> None:
        """After a call that raised: what counts is what the store says; if it says nothing, the worse is assumed."""
        try:
            there = self.backend.contains_many([str(key) for key in keys])
        except Exception:
            return
        for key, here in zip(keys, there, strict=True):
            if not here:
                self.ledger.forget_absent(key)

    def _delete(self, verb: str, delete: Callable[[], None]) -> None:
        self._writes.flush(self._runtime.now() + self.deadline)
        try:
            self.calls.order(verb, delete, seconds=max(OPERATOR_SECONDS, self.deadline)).result()
        except Exception as error:
            raise BackendError(f"{self.name}: {verb} failed, blobs may be left: {error}") from error

    def put_record(self, name: str, content: bytes) -> None:
        """Keep a small unframed record beside the blobs, in the background."""
        if self.policy.write == "never" or not self.backend.persistent:
            return
        try:
            self._record = self.calls.chore("put", lambda: self.backend.put(name, [content]), seconds=self.deadline)
        except BackendError as error:
            self.calls.report("put", error)

    def _close(self) -> None:
        self.upkeep.close()
        self._writes.close(self._runtime.now() + self.deadline)
        if self._record is not None:
            self._record.wait()
        self.calls.close()

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def abandoned_calls(self) -> int:
        """Backend calls past their deadline that have not returned yet."""
        return self.calls.abandoned

    def health(self) -> TierHealth:
        """How the tier is, from what is known here: nothing is asked of the backend."""
        self._check_here()
        calls = self.calls
        breaker = calls.reading if calls.reading.open else calls.writing
        state = "stuck" if calls.stuck else "paused" if calls.reading.open else "ok"
        hangs = self.upkeep.hangs
        if state == "ok" and calls.writing.open:
            state = "read only"
        if state == "ok" and hangs:
            state = "neglected"
        return TierHealth(
            self.name,
            state,
            reason="" if state == "ok" else calls.last_error or "upkeep: no answer",
            retry_in_seconds=max(0.0, breaker.probe_at - self._runtime.now()) if breaker.open else None,
            failures=max(calls.reading.failures, calls.writing.failures),
            abandoned_calls=calls.abandoned + hangs,
            waiting_bytes=self._writes.waiting_bytes,
            blobs=len(self.ledger),
            bytes=self.ledger.bytes,
            capacity=self.policy.capacity,
            recovered=self.ledger.complete,
            evicts=self.upkeep.evicts,
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _visit(self) -> Visit:
        return Visit(self._runtime, self.deadline, since=self._purges.mark())

    def _welcome(self, key: ChunkKey) -> bool:
        blobs = len(self.ledger)
        return self.ledger.welcome(key, self.ledger.bytes // blobs if blobs else 0)

    # -- the seed's interface ------------------------------------------------------------------------------------------

    def _take(self, key: ChunkKey) -> Loaded | None:
        visit = self._visit()
        if not self._writes.flush_one(key, visit.until):
            return None
        header = self.calls.ask("get", lambda: self._header_or_none(key), visit)
        if header is None:
            return None
        read = self.read(key, header.description.shape, header.description.num_tokens, visit)
        return None if read is None else self.collect(read)

    def _header_or_none(self, key: ChunkKey) -> envelope.Header | None:
        try:
            return self._presence.header(key)
        except (CorruptBlobError, UnreadableBlobError) as error:
            self._events.emit(Event("missed", self.name, chunks=1, reason=f"unreadable: {error}"))
            return None

    def _accept(self, key: ChunkKey, tensor: torch.Tensor) -> Write | None:
        self._check(tensor)
        if self.policy.write == "never":
            return None
        until, since = self._runtime.now() + self.deadline, self._purges.mark()
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
