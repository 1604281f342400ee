"""Chunks on their way from a stored tier into memory, whole or by layers: each byte is read once, whoever asks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from kvloom.bounded import one_line
from kvloom.contracts.observer import Event
from kvloom.contracts.storage import StorageBackend
from kvloom.errors import BackendError, CorruptBlobError, LaterVersionError, PartDownError, UnreadableBlobError
from kvloom.runtime import Call, Runtime
from kvloom.telemetry.events import EventBus
from kvloom.tiers.index.ledger import Fidelity, Ledger
from kvloom.tiers.memory.tier import MemoryTier
from kvloom.tiers.request_context import RequestContext
from kvloom.tiers.stored.calls import Calls, DecodeFailedError, DeviceFailedError, LocalError, NoRoomError
from kvloom.tiers.stored.existence import Existence
from kvloom.tiers.stored.inflight import Arrived, InflightRead, InflightReads, Read, Wanted, release
from kvloom.tiers.stored.layer_ranges import LayerBuffer, LayeredBlob, layered, read_layers
from kvloom.tiers.stored.mapped import MappedChunks
from kvloom.tiers.stored.read import BlobReader, ExpiredBlobError, Outcome
from kvloom.tiers.tier import Layout, Loaded
from kvloom.types import Chunk, ChunkKey

log = logging.getLogger(__name__)

_LEAST_BATCH_BYTES = 1 << 20
_MOST_BATCH_BYTES = 8 << 20
"""Bytes of chunks that one call reads: enough that a thread is woken for it, and soon done for those who wait."""


class Loads:
    """The loads of one tier. Nothing that the backend raises leaves this class."""

    def __init__(
        self, layout: Layout, backend: StorageBackend, reader: BlobReader, existence: Existence, ledger: Ledger,
        calls: Calls, memory: MemoryTier, mapped: MappedChunks, events: EventBus, runtime: Runtime, *, deletes: bool,
    ) -> None:  # fmt: skip
        """deletes: blobs that are corrupt or past their time are deleted; else they are not ours to delete."""
        self._name = calls.name
        self._layout = layout
        self._backend = backend
        self._reader = reader
        self._existence = existence
        self._ledger = ledger
        self._calls = calls
        self._memory = memory
        self._mapped = mapped
        self._invalidations = memory.invalidations
        self._events = events
        self._now = runtime.now
        self._deletes = deletes
        self._batches = type(backend).get_many_into is not StorageBackend.get_many_into
        self._maps = reader.views and type(backend).map is not StorageBackend.map
        self.inflight = InflightReads(calls, memory.invalidations, layout, runtime, self.read_layers)

    def read(self, wanted: Wanted, context: RequestContext) -> Read | None:
        """Begin to load a chunk into the pool; None if the tier cannot take the call. Collect with `collect`.

        Whoever asks for a chunk that is on its way already, whole or by layers, shares the calls that read it.
        """
        return self._begin(wanted, context) if self._calls.serves(context) else None

    def fetch(self, wanted: Sequence[Wanted], context: RequestContext) -> list[Loaded | Read | None]:
        """`read` of each, many by one call where the backend has better than one after the other.

        Where somebody has just read a chunk, it comes from memory.
        """
        if not self._calls.serves(context):
            return [None] * len(wanted)
        leased: list[Loaded | None] = [None] * len(wanted)
        if self._maps and not context.into_memory:
            leased = self._mapped.lease(wanted, doomed=self._existence.doomed)
        found: list[Loaded | Read | None] = [*leased]
        lacking = [number for number, one in enumerate(found) if one is None]
        if lacking:
            rest = [wanted[number] for number in lacking]
            # What is no longer on its way was in memory before that, if it is to be had.
            try:
                begun = self.inflight.begin_or_join(
                    rest, partial(self._load, context), context, most=self._most(rest), in_memory=self._memory.lease
                )
            except BaseException:
                for loaded in leased:
                    release(loaded)
                raise
            for number, one in zip(lacking, begun, strict=True):
                found[number] = one
        return found

    def maps(self, keys: Iterable[ChunkKey]) -> bool:
        """Return whether all keys are mapped, as far as is known without asking."""
        return self._maps and self._mapped.maps(keys) and not self._calls.paused

    def lease_mapped(self, wanted: Sequence[Wanted]) -> list[Loaded | None]:
        """Chunks that are mapped and still there, leased, if that is all of them; else none."""
        return self._mapped.lease(wanted, doomed=self._existence.doomed, all_or_none=True)

    def _begin(self, wanted: Wanted, context: RequestContext, *, anew: bool = False) -> Read | None:
        read = self.inflight.begin_or_join([wanted], partial(self._load, context), context, anew=anew)[0]
        assert not isinstance(read, Loaded)
        return read

    def _most(self, wanted: Sequence[Wanted]) -> int:
        """Return how many of these chunks one call reads: few enough that every thread has some, unless all are few."""
        if not self._batches:
            return 1
        nbytes = max(1, max(self._layout.nbytes(one.shape) for one in wanted))
        share = -(-len(wanted) // self._backend.threads)
        return max(1, min(max(share, _LEAST_BATCH_BYTES // nbytes), _MOST_BATCH_BYTES // nbytes))

    def collect(self, read: Read) -> Loaded | None:
        """The verified chunk, or None: not there, not readable, or not in time."""
        inflight, context = read.inflight, read.context
        if inflight.call is not None:
            return self.inflight.collect(read)
        try:
            outcome = self.inflight.await_all(read)
            if outcome and self._invalidations.hit(inflight.key, inflight.since):
                return None
            if outcome:
                return self.complete(inflight, context)[0]
            self.inflight.close(inflight)
        finally:
            self.inflight.leave(inflight)
        if outcome is None or not self._calls.serves(context):
            return None
        again = self._begin(inflight.wanted, context, anew=True)
        return None if again is None else self.inflight.collect(again)

    def give_up(self, read: Read) -> None:
        """Nobody will collect it."""
        self.inflight.leave(read.inflight)

    def complete(self, inflight: InflightRead, context: RequestContext) -> tuple[Loaded, bool]:
        """The chunk, all of whose layers have come right, leased and in memory; and whether nobody else did this."""
        loaded, block = self.inflight.complete(inflight)
        if block is None:
            return loaded, False
        assert inflight.blob is not None
        header = inflight.blob.header
        nbytes, ended = header.header_bytes + header.payload_bytes, self._now()
        context.record.note("read", self._name, inflight.began, ended, nbytes=nbytes)
        self._events.emit(Event("retrieved", self._name, inflight.wanted.num_tokens, 1, nbytes, ended - inflight.began))
        kept = self._memory.insert(
            inflight.key, loaded.chunk, block, written=loaded.written or None, dirty=False, since=inflight.since,
            chain=context.chain,
        )  # fmt: skip
        loaded.release()
        return kept, True

    def begin(
        self, key: ChunkKey, blob: LayeredBlob | None, place: LayerBuffer, num_tokens: int, layers: range
    ) -> Call[Arrived | None] | None:
        """Have a thread for reads run `read_layers`, for one load alone; None if the tier cannot take the call."""
        if self._calls.paused:
            return None
        try:
            read = partial(self.read_layers, key, blob, place, num_tokens, layers)
            judged = self._calls.judged("read", read, self._calls.reading)
            return self._calls.reads.submit(judged, seconds=self._calls.deadline)
        except BackendError as error:
            self._calls.failed("read", error, self._calls.reading)
            return None

    def read_layers(
        self, key: ChunkKey, blob: LayeredBlob | None, place: LayerBuffer, num_tokens: int, layers: range
    ) -> Arrived | None:
        """On the tier's thread: read some layers of a blob (None: what it is, is to be found out first) into `place`.

        0 layers if there is nothing that can be read by layers; None if nobody waits any more.
        """
        if not place.reservation.hold():
            return None
        try:
            blob = blob or self._open_layers(key, place.chunk_shape, num_tokens)
            return (None, 0) if blob is None else (blob, read_layers(self._backend, blob, place, layers))
        except (CorruptBlobError, UnreadableBlobError) as error:
            self._blame_serializer(error)
            return blob, 0
        except PartDownError as error:
            self._calls.part_down("read", error)
            return blob, 0
        finally:
            place.reservation.abandon()

    def _open_layers(self, key: ChunkKey, shape: tuple[int, ...], num_tokens: int) -> LayeredBlob | None:
        known_since = self._ledger.mark()
        try:
            header = None if key in self._existence.doomed() else self._existence.header(key)
            if header is None:
                return None
            serializer = self._reader.check(header, shape, num_tokens)
        except (CorruptBlobError, UnreadableBlobError, ExpiredBlobError):
            return None  # reading it whole says so, and does what is to be done about it
        self._existence.note(key, header, since=known_since)
        empty = torch.empty(shape, dtype=self._layout.dtype, device="meta")
        return layered(header, serializer, Chunk(empty, self._layout.format, num_tokens, header.description.fidelity))

    def _load(
        self, context: RequestContext, inflights: Sequence[InflightRead], wanted: Callable[[int], bool],
        tell: Callable[[int, Loaded | None], None],
    ) -> None:  # fmt: skip
        """As `ReadWhole`. context: of whoever was the first to ask; others share what comes of it."""
        began, record = self._now(), context.record
        since, known_since = self._invalidations.mark(), self._ledger.mark()
        again: deque[int] = deque()
        corrupt: set[int] = set()
        failures: list[Exception] = []

        def settle(number: int, outcome: Outcome, *, waited: bool) -> None:
            key, _, num_tokens = inflights[number].wanted
            loaded = None
            if isinstance(outcome, CorruptBlobError) and number not in corrupt:
                corrupt.add(number)
                again.append(number)
                return
            if isinstance(outcome, NoRoomError) and not waited:
                again.append(number)
                return
            if isinstance(outcome, CorruptBlobError):
                self._discard(key, num_tokens, outcome, context, since=known_since)
            elif isinstance(outcome, (UnreadableBlobError, ExpiredBlobError, LocalError, PartDownError)):
                self._miss(key, num_tokens, outcome, context, since=known_since)
            elif isinstance(outcome, Exception):
                failures.append(outcome)
                return
            elif outcome is None:
                self._ledger.forget_absent(key, since=known_since)
            else:
                header, loaded = outcome
                if self._invalidations.hit(key, since):
                    release(loaded)
                    loaded = None
                else:
                    self._existence.note(key, header, since=known_since)
                if loaded is not None:
                    nbytes = header.header_bytes + header.payload_bytes
                    ended = self._now()
                    record.note("read", self._name, began, ended, nbytes=nbytes)
                    self._events.emit(Event("retrieved", self._name, num_tokens, 1, nbytes, ended - began))
            tell(number, loaded)

        def read(numbers: Sequence[int], on_wait: Callable[[], None] | None = None) -> None:
            self._reader.read(
                self._backend, [inflights[number].wanted for number in numbers],
                lambda index, outcome: settle(numbers[index], outcome, waited=on_wait is not None),
                seconds=self._calls.deadline, since=since, chain=context.chain, on_wait=on_wait, record=record,
                device=context.device,
            )  # fmt: skip

        doomed = self._existence.doomed()
        numbers = [number for number, inflight in enumerate(inflights) if inflight.key not in doomed]
        # A device reads faster from memory that is pinned.
        if self._maps and not (context.into_memory or self._memory.pool.pinned):
            numbers = [number for number in numbers if wanted(number)]
            found = self._mapped.open([inflights[number].wanted for number in numbers])
            for number, one in zip(numbers, found, strict=True):
                if one is not None:
                    settle(number, one, waited=False)
            numbers = [number for number, one in zip(numbers, found, strict=True) if one is None]
        if len(numbers) > 1:
            read(numbers)
        else:
            again.extend(numbers)
        while again:
            number = again.popleft()
            if wanted(number):
                read([number], partial(self.inflight.starve, inflights[number]))
        if failures:
            raise failures[0]

    def _miss(self, key: ChunkKey, num_tokens: int, error: Exception, context: RequestContext, *, since: int) -> None:
        reason = "no room in memory"
        if isinstance(error, UnreadableBlobError):
            reason = "unreadable"
            log.info("tier=%s a blob of no use here: %s", self._name, one_line(error))
            self._blame_serializer(error)
            later = isinstance(error, LaterVersionError)
            self._ledger.note(key, Fidelity.LATER if later else Fidelity.UNREADABLE, since=since)
        elif isinstance(error, DeviceFailedError):
            reason = "device failed"
            self._calls.report("decode", error)
        elif isinstance(error, PartDownError):
            reason = "no answer"
            self._calls.part_down("read", error)
        elif isinstance(error, ExpiredBlobError):
            reason = "expired"
            self._delete_if_possible(key, reason, since=since)
        context.misses[key] = reason
        self._events.emit(Event("missed", self._name, tokens=num_tokens, chunks=1, reason=reason))

    def _discard(
        self, key: ChunkKey, num_tokens: int, error: CorruptBlobError, context: RequestContext, *, since: int
    ) -> None:
        context.misses[key] = "corrupt"
        self._events.emit(Event("corrupt", self._name, tokens=num_tokens, chunks=1))
        distant = self._backend.shared and (self._backend.bounded or self._backend.one_by_one)
        if self._deletes and distant:
            # The line may be bad, and the blob good for everybody else: storing the chunk anew writes over it.
            log.warning("tier=%s a corrupt blob, not to be read again: %s", self._name, one_line(error))
            self._ledger.note(key, Fidelity.UNREADABLE, since=since)
        else:
            log.warning("tier=%s removing a corrupt blob: %s", self._name, one_line(error))
            self._delete_if_possible(key, "corrupt", since=since)

    def _blame_serializer(self, error: Exception) -> None:
        if isinstance(error, DecodeFailedError) and isinstance(error.__cause__, Exception):
            self._calls.report("decode", error.__cause__)

    def _delete_if_possible(self, key: ChunkKey, reason: str, *, since: int) -> None:
        """Delete a blob of no use. One that stays is not read again: that is no failure of reading."""
        if self._deletes:
            try:
                self._backend.delete(str(key))
            except Exception as failure:
                self._calls.report("delete", failure)
                self._ledger.note(key, Fidelity.UNREADABLE, since=since)
                return
            self._ledger.evictions.note([key.digest], reason)
        self._ledger.forget([key])
        self._events.left(self._name, [key])
