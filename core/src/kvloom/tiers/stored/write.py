"""Writing chunks as blobs: encoded, framed, given room, put, and counted as what each turned out to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvloom.contracts.observer import Event
from kvloom.contracts.serializer import Serializer
from kvloom.contracts.storage import StorageBackend
from kvloom.errors import BackendError, PartDownError
from kvloom.format import envelope
from kvloom.format.encryption import Protection
from kvloom.memory import pages_of
from kvloom.runtime import Runtime
from kvloom.telemetry.events import EventBus
from kvloom.tiers.index.ledger import Fidelity, Ledger, Victim
from kvloom.tiers.invalidation import InflightWrites, Invalidations
from kvloom.tiers.stored.calls import tamed
from kvloom.tiers.stored.maintenance import Maintenance
from kvloom.tiers.stored.write_queue import Write, WriteTold
from kvloom.tiers.tier import Loaded
from kvloom.types import EXACT, Buffers, ChunkKey

_NO_ROOM = "no room within the tier's bounds, or just being deleted"
_REMOVED = "removed while it was being written"


@dataclass(eq=False, slots=True)
class _Blob:
    """A chunk on its way into the store."""

    number: int
    write: Write
    framed: Buffers
    nbytes: int
    victims: Sequence[Victim]
    """To be deleted before it is put."""
    excess: Sequence[Victim] = field(default=())
    """To be deleted after it was put."""

    @property
    def name(self) -> str:
        return str(self.write.key)

    @property
    def space(self) -> int:
        return pages_of(self.nbytes)


_Told = Callable[[_Blob, "Exception | None"], None]


class BlobWriter:
    """Writes chunks to one tier."""

    def __init__(
        self, backend: StorageBackend, serializer: Serializer, ledger: Ledger, maintenance: Maintenance,
        invalidations: Invalidations, events: EventBus, runtime: Runtime, *, protection: Protection | None = None,
        name: str = "",
    ) -> None:  # fmt: skip
        """name: the tier's."""
        self._name = name
        self._backend = backend
        self._serializer = serializer
        self._protection = protection
        self._ledger = ledger
        self._maintenance = maintenance
        self._invalidations = invalidations
        self._inflight = InflightWrites(invalidations, runtime)
        self.doomed = self._inflight.doomed
        self._events = events
        self._now = runtime.now
        self.batches = type(backend).put_many is not StorageBackend.put_many
        """It is worth writing several chunks by one call."""
        self._replaces = type(backend).put_over is not StorageBackend.put_over

    def write(self, writes: Sequence[Write], told: WriteTold, failed: list[tuple[int, str]]) -> Exception | None:
        """Write chunks, many of them by one call of the backend where that has better than one after the other.

        told: called once for each that is stored or lost, as soon as it is. failed: gets the others, which serializer
        or backend have raised for, each with why it is lost: nobody is to hear of them before the failure is counted.
        Return the first of what was raised, the store's failures before those of a part: not raised here, which would
        make it refer to the chunks.
        """
        began, failures = self._now(), list[Exception]()
        inflight = [(write.key, write.since) for write in writes]

        def tell(number: int, lost: str = "") -> None:
            self._inflight.end(inflight[number])
            told(number, lost)

        def fail(number: int, error: Exception) -> None:
            failures.append(error)
            self._inflight.end(inflight[number])
            failed.append((number, f"write failed: {type(error).__name__}"))

        def stored(blob: _Blob) -> None:
            write, ended = blob.write, self._now()
            write.record.note("write", self._name, began, ended, nbytes=blob.nbytes)
            tokens = write.loaded.chunk.num_tokens
            self._events.emit(Event("stored", self._name, tokens, 1, blob.nbytes, ended - began))
            self._events.came(self._name, [write.key])
            tell(blob.number)

        later: list[tuple[_Blob, Exception | None]] = []

        def put(blob: _Blob, error: Exception | None) -> None:
            """Maybe amid a call of the backend, which is not called then."""
            if error is None and not self._removed(blob.write):
                self._note(blob)
                if not blob.excess:
                    stored(blob)
                    return
            later.append((blob, error))

        self._inflight.begin(inflight)
        try:
            self._put(self._admitted(writes, tell, fail), put)
            doubtful: list[tuple[_Blob, Exception]] = []
            for blob, error in later:
                if error is not None:
                    error = self._put_again(blob, error)
                if self._removed(blob.write) and not blob.excess:
                    error = self._retract(blob) or error
                    tell(blob.number, _REMOVED) if error is None else fail(blob.number, error)
                elif error is not None:
                    doubtful.append((blob, error))
                else:
                    if not blob.excess:
                        self._note(blob)
                    self._maintenance.trim(blob.excess)
                    stored(blob)
            self._reconsider([blob for blob, _ in doubtful])
            for blob, error in doubtful:
                fail(blob.number, error)
        finally:
            self._inflight.end(*inflight)
        return min(failures, key=lambda error: isinstance(error, PartDownError), default=None)

    def _removed(self, write: Write) -> bool:
        """Return whether the chunk was removed since it was got, or damaged while it was read."""
        return self._invalidations.hit(write.key, write.since) or not write.loaded.lease.intact

    def _admitted(
        self, writes: Sequence[Write], tell: Callable[[int, str], None], fail: Callable[[int, Exception], None]
    ) -> list[_Blob]:
        """Encode the chunks and count their blobs. From then on each has to be noted, or forgotten."""
        blobs = []
        for number, write in enumerate(writes):
            if self._removed(write):
                tell(number, _REMOVED)
                continue
            began = write.record.now()
            try:
                framed = tamed(partial(self._framed, write.key, write.loaded, reuse=len(writes) == 1))
            except Exception as error:
                fail(number, error)
                continue
            codec, kv_bytes = self._serializer.type, write.loaded.chunk.nbytes
            write.record.note("encode", self._name, began, write.record.now(), nbytes=kv_bytes, codec=codec)
            nbytes = sum(memoryview(part).nbytes for part in framed)
            victims = self._ledger.admit(write.key, pages_of(nbytes), write.chain)
            if victims is None:
                tell(number, _NO_ROOM)
            else:
                blobs.append(_Blob(number, write, framed, nbytes, victims))
        return blobs

    def _framed(self, key: ChunkKey, loaded: Loaded, *, reuse: bool) -> Buffers:
        chunk, serializer = loaded.chunk, self._serializer
        description = envelope.Description(
            str(key),
            serializer.type,
            tuple(chunk.tensor.shape),
            str(chunk.tensor.dtype).removeprefix("torch."),
            chunk.format.value,
            chunk.num_tokens,
            serializer.fidelity,
            serializer.params,
            int(loaded.written),
            chunk.start,
        )
        return envelope.seal(description, serializer.encode(chunk), self._protection, reuse=reuse)

    # -- putting -------------------------------------------------------------------------------------------------------

    def _put(self, blobs: Sequence[_Blob], put: _Told) -> None:
        """Put blobs, in the place of their victims. What has victims goes first, so that there is room for the rest."""
        alone, together = list(blobs), list[_Blob]()
        if self.batches and len(blobs) > 1:
            alone, together = [blob for blob in blobs if blob.victims], [blob for blob in blobs if not blob.victims]
            if alone and not self._replaces:
                error = _raised(partial(self._maintenance.delete, [one for blob in alone for one in blob.victims]))
                if error is None:
                    alone, together = [], list(blobs)
                for blob in alone:
                    put(blob, error)
                alone = []
        for blob in alone:
            put(blob, _raised(partial(self._maintenance.put, blob.write.key, blob.framed, blob.victims)))
        if together:
            self._put_many(together, put)

    def _put_many(self, blobs: Sequence[_Blob], put: _Told) -> None:
        unsaid = dict(enumerate(blobs))

        def done(number: int, outcome: Exception | None) -> None:
            blob = unsaid.pop(number, None)
            if blob is not None:
                put(blob, outcome)

        requests = [(blob.name, blob.framed) for blob in blobs]
        error = _raised(partial(self._backend.put_many, requests, done))
        left, unsaid = unsaid, {}
        for blob in left.values():
            put(blob, error or BackendError("put_many did not report what became of a blob"))

    def _put_again(self, blob: _Blob, error: Exception) -> Exception | None:
        """Put what failed once more if the store was full and something could be deleted: what it raised then."""
        try:
            made = tamed(partial(self._maintenance.make_room, error, blob.space))
        except Exception as other:
            return other
        return _raised(partial(self._backend.put, blob.name, blob.framed)) if made else error

    # -- counting ------------------------------------------------------------------------------------------------------

    def _note(self, blob: _Blob) -> None:
        """It is there."""
        write = blob.write
        fidelity = Fidelity.EXACT if self._serializer.fidelity == EXACT else Fidelity.LOSSY
        self._ledger.note(write.key, fidelity, nbytes=blob.space, written=write.loaded.written or None)
        self._maintenance.owes_no_more(write.key)
        blob.excess = self._ledger.excess(write.key, write.chain)

    def _retract(self, blob: _Blob) -> Exception | None:
        """Delete what was removed while it was written: it may be there, also if putting it failed."""
        key = blob.write.key
        error = _raised(partial(self._backend.delete, blob.name))
        if error is None:
            self._ledger.forget([key])
            return None
        self._reconsider([blob], Fidelity.UNREADABLE)  # until it is gone: counted, and not served
        self._maintenance.owes(key)
        return error

    def _reconsider(self, blobs: Sequence[_Blob], fidelity: Fidelity = Fidelity.UNKNOWN) -> None:
        """After calls that raised: ask the store which of these blobs are there."""
        if not blobs:
            return
        keys = [blob.write.key for blob in blobs]
        for blob, here in zip(blobs, self._maintenance.still_there(keys), strict=True):
            if here:
                self._ledger.note(blob.write.key, fidelity, nbytes=blob.space)
            else:
                self._ledger.forget([blob.write.key])


def _raised(call: Callable[[], object]) -> Exception | None:
    try:
        tamed(call)
    except Exception as error:
        return error
    return None
