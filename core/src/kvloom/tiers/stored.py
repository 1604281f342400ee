"""A stored tier: any backend, made a cache level by a serializer, the envelope, a ledger and bounded threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from kvloom import envelope
from kvloom.contracts.observer import Event
from kvloom.contracts.serializer import Serializer
from kvloom.contracts.storage import StorageBackend
from kvloom.errors import BackendError, CorruptBlobError, DeadlineExceeded, UnreadableBlobError
from kvloom.events import EventBus
from kvloom.memory import pages_of
from kvloom.runtime import Call, Runtime, Workers
from kvloom.tiers.base import Layout, Loaded, Tier
from kvloom.tiers.ledger import Fidelity, Ledger
from kvloom.tiers.memory import MemoryTier
from kvloom.tiers.purges import Purges
from kvloom.tiers.reader import BlobReader
from kvloom.tiers.writes import Write, WriteQueue
from kvloom.types import EXACT, Chunk, ChunkKey

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Read:
    """A chunk on its way from a backend."""

    tier: StoredTier
    call: Call[Loaded | None]


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
        capacity: int | None,
        deadline: float,
        write: bool = True,
        exact_only: bool = False,
        dst_device: str = "cpu",
    ) -> None:
        """serializers: the one to encode with, then others that blobs found in the store may be decoded with."""
        super().__init__(name, layout, dst_device=dst_device)
        self.backend = backend
        self.deadline = deadline
        self.write = write
        self.ledger = Ledger(capacity, runtime)
        self.serializer = serializers[0]
        self._reader = BlobReader(layout, serializers, memory, exact_only=exact_only)
        self._exact_only = exact_only
        self._memory = memory
        self._events = events
        self._runtime = runtime
        self._purges = Purges()
        self._record: Call[None] | None = None
        self.ledger.complete = not (backend.persistent or backend.shared)
        self._reads = Workers(runtime, name=f"kvloom-{name}-read", threads=backend.threads)
        # A question takes no time: it must not wait behind reads, nor either behind a listing.
        self._questions = Workers(runtime, name=f"kvloom-{name}-ask", threads=min(2, backend.threads))
        self._chores = Workers(runtime, name=f"kvloom-{name}-chore", threads=1)
        self._writes = WriteQueue(
            Workers(runtime, name=f"kvloom-{name}-write", threads=min(2, backend.threads)),
            runtime,
            deadline=deadline,
            max_bytes=memory.pool.capacity // 2,
            on_lost=self._on_lost,
        )
        # Listing runs as a call like any other, but unhurried and with nobody waiting.
        if backend.persistent and capacity is not None:
            self._chores.submit(self._recover)

    # -- finding -------------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which keys the tier is believed to hold in a form that this engine can use."""
        names = [str(key) for key in keys]
        known = self.ledger.known(names)
        if self.backend.shared or not self.ledger.complete:
            unknown = [name for name, fidelity in zip(names, known, strict=True) if fidelity is None]
            there = self._present(unknown)
            return [there.get(name, self._usable(fidelity)) for name, fidelity in zip(names, known, strict=True)]
        return [self._usable(fidelity) for fidelity in known]

    def satisfied(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """For which keys an exact chunk need not be written: there, being written, or no writing at all now.

        A lossless tier is not satisfied by a lossy or unreadable blob; what a blob is, is read from its header once.
        """
        if not self.write or self._writes.stuck:
            return [True] * len(keys)
        names = [str(key) for key in keys]
        known = self.ledger.known(names)
        if not self.serializer.lossless:
            present = self.find(keys)
            return [here or self._writes.pending(name) for here, name in zip(present, names, strict=True)]
        unsure = [
            name
            for name, fidelity in zip(names, known, strict=True)
            if (fidelity is Fidelity.UNKNOWN or (fidelity is None and self._may_hold_unknown))
            and not self._writes.pending(name)
        ]
        silent: set[str] = set()
        if unsure:
            answer = self._ask("contains", lambda: self._peek(unsure))
            if answer is None:
                return [True] * len(keys)
            silent = answer
            known = self.ledger.known(names)
        return [
            fidelity is Fidelity.EXACT or name in silent or self._writes.pending(name)
            for fidelity, name in zip(known, names, strict=True)
        ]

    def contains(self, key: ChunkKey) -> bool:
        return self._writes.pending(str(key)) or self.find([key])[0]

    def touch(self, chain: Sequence[ChunkKey]) -> None:
        """Note that a chain was used."""
        if self.ledger.capacity is not None:
            self.ledger.touch([str(key) for key in chain])

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, key: ChunkKey, shape: Sequence[int], num_tokens: int) -> Read | None:
        """Begin to load a chunk into the pool; None if the tier cannot take the call. Collect with `collect`."""
        load = partial(self._load, key, tuple(shape), num_tokens)
        try:
            return Read(self, self._reads.submit(load, seconds=self.deadline, discard=_release))
        except BackendError as error:
            self._report("read", error)
            return None

    def collect(self, read: Read) -> Loaded | None:
        """The verified chunk, or None: not there, not readable, or not in time."""
        try:
            return read.call.result()
        except Exception as error:
            self._report("read", error)
            return None

    def _load(self, key: ChunkKey, shape: tuple[int, ...], num_tokens: int) -> Loaded | None:
        name = str(key)
        began = self._runtime.now()
        until = began + self.deadline
        since = self._purges.mark()
        for attempt in (1, 2):
            try:
                arrived = self._reader.read(self.backend, key, shape, num_tokens, until)
            except UnreadableBlobError as error:
                self.ledger.note(name, Fidelity.UNREADABLE)
                reason = f"unreadable: {error}"
                self._events.emit(Event("missed", self.name, tokens=num_tokens, chunks=1, reason=reason))
                return None
            except CorruptBlobError as error:
                if attempt == 2:
                    self._discard(name, num_tokens, error)
                continue
            if arrived is None:
                self.ledger.forget([name])
                return None
            header, loaded = arrived
            if self._purges.hit(name, since):  # after `insert`, so that either it or the removal sees the other
                self._memory.remove([key])
                _release(loaded)
                return None
            self._note(name, header)
            if loaded is not None:
                nbytes = header.header_bytes + header.payload_bytes
                self._events.emit(Event("retrieved", self.name, num_tokens, 1, nbytes, self._runtime.now() - began))
            return loaded
        return None

    def _discard(self, name: str, num_tokens: int, error: CorruptBlobError) -> None:
        log.warning("tier=%s removing a corrupt blob: %s", self.name, str(error))
        self._events.emit(Event("corrupt", self.name, tokens=num_tokens, chunks=1, reason=str(error)))
        self.ledger.forget([name])
        self.backend.delete(name)

    # -- writing -------------------------------------------------------------------------------------------------------

    def submit(self, key: ChunkKey, loaded: Loaded, *, until: float) -> Write | None:
        """Write an exact chunk in the background, taking over its lease; None (and counted) if it was dropped."""
        chunk = loaded.chunk
        assert chunk.exact, "lossy chunks are never written on: they would be encoded twice"
        name = str(key)
        self.ledger.expect(name)
        store = partial(self._store, name, chunk, self._purges.mark())
        write = self._writes.submit(name, store, loaded.lease, chunk, until=until)
        if write is None:
            self.ledger.forget_pending(name)
            self._on_lost(chunk, "the write queue is full")
        return write

    def flush(self, until: float) -> bool:
        """Wait until every accepted write has been written or has failed; False if `until` came first."""
        return self._writes.flush(until)

    def _store(self, name: str, chunk: Chunk, since: int) -> bool:
        began = self._runtime.now()
        serializer = self.serializer
        framed = envelope.seal(
            envelope.Description(
                name,
                serializer.type,
                tuple(chunk.tensor.shape),
                str(chunk.tensor.dtype).removeprefix("torch."),
                chunk.format.value,
                chunk.num_tokens,
                serializer.fidelity,
                serializer.params,
            ),
            serializer.encode(chunk),
        )
        nbytes = sum(memoryview(part).nbytes for part in framed)
        victims = self.ledger.admit(name, pages_of(nbytes))
        if victims is None:
            self._on_lost(chunk, "larger than the tier's capacity")
            return False
        try:
            self._evict(victims)
            self.backend.put(name, framed)
        except BaseException:
            self.ledger.forget([name])
            raise
        if self._purges.hit(name, since):
            self.ledger.forget([name])
            self.backend.delete(name)
            return False
        fidelity = Fidelity.EXACT if serializer.fidelity == EXACT else Fidelity.LOSSY
        self.ledger.note(name, fidelity, nbytes=pages_of(nbytes))
        self._events.emit(Event("stored", self.name, chunk.num_tokens, 1, nbytes, self._runtime.now() - began))
        return True

    def _evict(self, victims: Sequence[tuple[str, int]]) -> None:
        if victims:
            self.backend.delete_many([name for name, _ in victims])
            self._events.emit(Event("evicted", self.name, chunks=len(victims), bytes=sum(size for _, size in victims)))

    def _on_lost(self, chunk: Chunk, reason: str) -> None:
        self._events.emit(Event("dropped", self.name, chunk.num_tokens, 1, chunk.nbytes, reason=reason))

    # -- operator's verbs ----------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        """Delete blobs; they are gone on return. Raises BackendError if that cannot be said."""
        names = [str(key) for key in keys]
        self._purges.add(frozenset(names).__contains__)
        self._delete("remove", lambda: names)

    def clear(self, prefix: str) -> None:
        """Delete every blob whose key starts with `prefix`; as `remove` does."""
        self._purges.add(lambda name: name.startswith(prefix))

        def listed() -> list[str]:
            found = [entry.key for entry in self.backend.scan(prefix)]
            return found + [name for name in self.ledger.names() if name.startswith(prefix)]

        self._delete("clear", listed)

    def _delete(self, verb: str, names: Callable[[], Sequence[str]]) -> None:
        self._writes.flush(self._runtime.now() + self.deadline)

        def delete() -> None:
            doomed = names()
            self.backend.delete_many(doomed)
            self.ledger.forget(doomed)

        try:
            # However many there are, it is the operator who waits.
            self._chores.run(delete, seconds=max(60.0, self.deadline))
        except Exception as error:
            self._report(verb, error)
            raise BackendError(f"{self.name}: {verb} failed, blobs may be left: {error}") from error

    def put_record(self, name: str, content: bytes) -> None:
        """Keep a small unframed record beside the blobs, in the background."""
        if not self.write or not self.backend.persistent:
            return

        def put() -> None:
            try:
                self.backend.put(name, [content])
            except Exception as error:
                self._report("put", error)

        try:
            self._record = self._chores.submit(put, seconds=self.deadline)
        except BackendError as error:
            self._report("put", error)

    def _close(self) -> None:
        self._writes.close(self._runtime.now() + self.deadline)
        if self._record is not None:
            self._record.wait()
        try:
            self._chores.run(self.backend.close, seconds=self.deadline)
        except Exception as error:
            self._report("close", error)
        for workers in (self._reads, self._questions, self._chores):
            workers.close(self.deadline if not workers.abandoned else 0.0)

    @property
    def abandoned_calls(self) -> int:
        """Backend calls past their deadline that have not returned yet."""
        everybody = (self._reads, self._questions, self._chores, self._writes.workers)
        return sum(workers.abandoned for workers in everybody)

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _may_hold_unknown(self) -> bool:
        return self.backend.shared or (not self.ledger.complete and self.backend.persistent)

    def _usable(self, fidelity: Fidelity | None) -> bool:
        if fidelity is None or fidelity is Fidelity.UNREADABLE:
            return False
        return fidelity is not Fidelity.LOSSY or not self._exact_only

    def _present(self, names: Sequence[str]) -> dict[str, bool]:
        if not names:
            return {}
        there = self._ask("contains", lambda: self.backend.contains_many(names))
        return {} if there is None else dict(zip(names, there, strict=True))

    def _peek(self, names: Sequence[str]) -> set[str]:
        """Learn what the blobs of `names` are from their headers; those about which the store only raised."""
        silent = set()
        for name, here in zip(names, self.backend.contains_many(names), strict=True):
            try:
                header = self._header(name) if here else None
            except (CorruptBlobError, UnreadableBlobError):
                self.ledger.note(name, Fidelity.UNREADABLE)
                continue
            except Exception as error:
                self._report("peek", error)
                silent.add(name)
                continue
            if header is not None:
                self._note(name, header)
            else:
                self.ledger.forget_absent(name)
        return silent

    def _header(self, name: str) -> envelope.Header | None:
        """The header of a blob, or None if there is no such blob. Raises as `envelope.parse` does."""
        page = memoryview(bytearray(envelope.ALIGN_BYTES))
        if not self.backend.get_range(name, 0, page):
            if not self.backend.contains(name):
                return None
            raise CorruptBlobError("the blob is cut short")
        length = envelope.header_bytes(page)
        if length > len(page):
            page = memoryview(bytearray(length))
            if not self.backend.get_range(name, 0, page):
                raise CorruptBlobError("the blob is cut short")
        return envelope.parse(page, key=name)

    def _note(self, name: str, header: envelope.Header) -> None:
        fidelity = Fidelity.EXACT if header.exact else Fidelity.LOSSY
        self.ledger.note(name, fidelity, nbytes=pages_of(header.header_bytes + header.payload_bytes))

    def _recover(self) -> None:
        try:
            entries = [entry for entry in self.backend.scan() if not entry.key.startswith("spec/")]
            self._evict(self.ledger.recover(entries))
        except Exception as error:
            self._report("scan", error)

    def _ask(self, verb: str, function: Callable[[], T]) -> T | None:
        try:
            return self._questions.run(function, seconds=self.deadline)
        except Exception as error:
            self._report(verb, error)
            return None

    def _report(self, verb: str, error: Exception) -> None:
        reason = "deadline" if isinstance(error, DeadlineExceeded) else type(error).__name__
        log.warning("tier=%s verb=%s failed: %s: %s", self.name, verb, type(error).__name__, str(error))
        self._events.emit(Event("tier_error", self.name, reason=f"{verb}: {reason}"))
        if self._reads.stuck or self._questions.stuck:
            self._events.emit(Event("tier_paused", self.name, reason="every thread is held by an overdue call"))

    # -- the seed's interface ------------------------------------------------------------------------------------------

    def _take(self, key: ChunkKey) -> Loaded | None:
        if not self._writes.flush_one(str(key), self._runtime.now() + self.deadline):
            return None
        header = self._ask("get", lambda: self._header(str(key)))
        if header is None:
            return None
        read = self.read(key, header.description.shape, header.description.num_tokens)
        return None if read is None else self.collect(read)

    def _accept(self, key: ChunkKey, tensor: torch.Tensor) -> Write | None:
        self._check(tensor)
        if not self.write:
            return None
        until = self._runtime.now() + self.deadline
        reservation = self._memory.reserve_by(self.layout.nbytes(tensor.shape), until)
        block = None
        if reservation is not None:
            chunk = self._blob_chunk(tensor, reservation.tensor(tensor.shape, self.layout.dtype))
            block = reservation.seal()
        if block is None:
            return None
        loaded = Loaded(chunk, block.lease())
        block.drop()
        return self.submit(key, loaded, until=until)

    def _settled(self, token: Write) -> bool:
        return self._writes.wait(token, self._runtime.now() + self.deadline)


def _release(loaded: Loaded | None) -> None:
    if loaded is not None:
        loaded.release()
