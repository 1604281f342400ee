"""StorageBackend: keys to bytes. Policy (capacity, TTL, eviction, checksums, deadlines) is the core's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

from kvloom.contracts.component import Component
from kvloom.types import Buffer, Buffers, Entry


def join(blob: Buffers) -> bytes:
    """The blob's buffers as one `bytes`: a copy, for stores that cannot write several buffers."""
    return b"".join(blob)


class Sink(Protocol):
    """The destination of `get_into`: the caller's memory, page-aligned.

    A sink may have `max_bytes`, and refuses a longer blob. A backend whose client returns the length only together with
    the blob asks for the length first in that case, so that no longer blob is read into memory.

    It may also have `expected_bytes`: the length that the blob has in all likelihood, at most `max_bytes`; 0: unknown.
    Where asking for a length is a request of its own, reserve so much and read. If the length was another, begin anew.
    """

    def reserve(self, num_bytes: int) -> memoryview:
        """Writable memory for the whole blob, asked for before any of it is read.

        Asked again, it gives other memory, and what is in the first counts for nothing. Raises BackendError if there is
        no room, CorruptBlobError if no blob can be that long; do not catch them.
        """

    def filled(self, num_bytes: int) -> None:
        """The first `num_bytes` bytes have arrived: the core verifies them while they are in the processor's cache."""


class NativeSink(Sink, Protocol):
    """A sink that native code can report to without the interpreter. Ask `kvloom.native.filled_by` for it."""

    def native_filled(self) -> tuple[int, int] | None:
        """The address of a C function `int (*)(void *state, uint64_t num_bytes)` that does the work of `filled`, and
        its state; None if there is none.

        Asked for after `reserve`, whose memory it is about; valid until the request is reported as done. It may be
        called by any one thread at a time. Anything but 0: do not call it again for this blob, but read all of it.
        Call `filled` once when all bytes have arrived, whatever it returned.
        """


class MappedBlob(Protocol):
    """A whole blob in memory that this process shares with the store."""

    view: memoryview
    """The blob; not to be touched after `close`. It is writable, and what is written to it stays this process's own."""

    def current(self) -> bool:
        """Return whether the store still has this very blob under its key, and nothing else was read from `view`.

        Asked before and after `view` is read; if it was True both times, what was read is what was verified once. Takes
        microseconds.
        """

    def gone(self) -> bool:
        """Return whether the blob is no more under its key, or another is: that leaves the bytes of `view` as they are.

        False of one that is there and was changed: it may have been changed back.
        """

    def close(self) -> None:
        """Give the memory back."""


ReadDone = Callable[[int, "bool | Exception"], None]
"""Told of each request of `get_many_into`, once: its number, and what `get_into` returned or raised."""
WriteDone = Callable[[int, "Exception | None"], None]
"""Told of each request of `put_many`, once: its number, and what `put` raised, None if it returned."""


class StorageBackend(Component):
    """A store of blobs by key. Four methods make one; the rest is for speed.

    Keys are strings of `[A-Za-z0-9._-]` and `/`, at most 200 characters; a part between two `/` is never empty, `.` or
    `..`, and one key may be the beginning of another (`a`, `a/b`). Blobs are never empty. Called from several threads
    at once. Raise any exception on failure: the core counts it, reports it and serves a miss; after several in a row
    it leaves the store alone for a while. Of a store with several servers, raise PartDownError for the keys of one that
    does not answer while others do, or say that it has none of them: keys of the others are then still asked for.
    Imports no torch.
    """

    persistent: ClassVar[bool] = False
    """Blobs survive `close` and reopening, and `scan` lists them, so that a restart can find and count them.

    Only a store that is `shared` and `bounded` too need not list them: it is asked for every key, and limits its own
    size.
    """
    shared: ClassVar[bool] = False
    """Other processes that open the same store see it."""
    bounded: ClassVar[bool] = False
    """The store evicts on its own."""
    one_by_one: ClassVar[bool] = False
    """Each key passed to `contains_many` costs a request. For a chain of keys the core then asks for as few as it takes
    to find the end, `threads` at a time, and assumes that the keys before it exist until they are read."""
    threads: ClassVar[int] = 4
    """Maximum number of concurrent reads, 1 or more. Up to two writes run in addition."""

    @abstractmethod
    def put(self, key: str, blob: Buffers) -> None:
        """Store `blob` under `key`: all or nothing, the last one wins. After return the caller may reuse the buffers.

        This also holds if the process is killed meanwhile: a `persistent` store then has the whole blob, or the one
        before it, or none.
        """

    @abstractmethod
    def get(self, key: str) -> Buffer | None:
        """The blob, or None if there is none. The result keeps its bytes, also after `close`."""

    @abstractmethod
    def contains(self, key: str) -> bool:
        """Return whether there is a blob under `key`."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Forget `key`; it is fine if there is nothing."""

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """Every blob whose key starts with `prefix`, in any order; where a store cannot list, nothing.

        The prefix is literal text. Other methods may be called while a listing is under way, and a listing may be
        abandoned. If places that may hold blobs cannot be read, continue with the others and raise
        IncompleteListingError at the end: the core then uses the entries, and stops writing.
        """
        return iter(())

    # -- for speed ---------------------------------------------------------------------------------------------------

    def get_into(self, key: str, sink: Sink) -> bool:
        """Put the blob into memory that `sink` gives; False if there is none."""
        blob = self.get(key)
        if blob is None:
            return False
        view = memoryview(blob).cast("B")
        sink.reserve(len(view))[:] = view
        sink.filled(len(view))
        return True

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        """`get_into` of several at once, in any order, for stores that do that better than one after the other.

        `done` is called on the calling thread, once for each request and as soon as its outcome is known: True, False,
        or the exception that `get_into` would have raised. A sink that raises ends its own request only. If this
        raises, requests that were not reported have failed with that exception. The core forms batches only for
        backends that override it, of some MiB each, and up to `threads` of them at once. The deadline is for each
        outcome, counted from the one before: on a slow store, finish the first blobs before you begin the last.
        """
        for number, (key, sink) in enumerate(requests):
            try:
                outcome: bool | Exception = self.get_into(key, sink)
            except Exception as error:
                outcome = error
            done(number, outcome)

    def map(self, key: str, most_bytes: int) -> MappedBlob | None:
        """The blob as memory, without a copy; None if there is none, it has to be read, or is longer than `most_bytes`.

        Of a longer one nothing is touched, for to read a hole in a file takes memory.
        For stores in the memory of this machine: a blob that is mapped is verified once and then read where it lies.
        Whatever becomes of the blob, to read `view` must not end the process.
        """
        return None

    def map_many(self, requests: Sequence[tuple[str, int]]) -> list[MappedBlob | None]:
        """`map` of each key and `most_bytes`, in their order. If this raises, nothing has been mapped."""
        found: list[MappedBlob | None] = []
        try:
            for key, most_bytes in requests:
                found.append(self.map(key, most_bytes))
        except BaseException:
            for blob in found:
                if blob is not None:
                    blob.close()
            raise
        return found

    def current_many(self, blobs: Sequence[MappedBlob]) -> list[bool]:
        """`current` of each, in their order. blobs: of this store; one may come twice."""
        return [blob.current() for blob in blobs]

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        """Fill `into` with the blob's bytes from `offset`; False if there is no blob or it ends before.

        offset: bytes, 0 or more. After False `into` may hold anything. An empty `into` is filled if the blob reaches as
        far as `offset`, which may be its end.
        """
        blob = self.get(key)
        if blob is None:
            return False
        view = memoryview(blob).cast("B")
        if len(view) < offset + len(into):
            return False
        into[:] = view[offset : offset + len(into)]
        return True

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        """`put` of several at once, in any order, for stores that do that better than one after the other.

        `done` is called on the calling thread, once for each request and as soon as its outcome is known: None, or the
        exception that `put` would have raised. From then on the caller may reuse that request's buffers. One that
        fails ends itself only. If a key comes twice, the later blob is there in the end. If this raises, requests that
        were not reported have failed with that exception; their blobs may be there, each of them whole. The core forms
        batches only for backends that override it, of writes that wait anyway, of some MiB each. The deadline is for
        each outcome after the one before: of a slow store, the first blobs should be done before the last are begun.
        """
        for number, (key, blob) in enumerate(requests):
            outcome: Exception | None = None
            try:
                self.put(key, blob)
            except Exception as error:
                outcome = error
            done(number, outcome)

    def get_many(self, keys: Sequence[str]) -> list[Buffer | None]:
        """`get` of each key, in their order."""
        return [self.get(key) for key in keys]

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        """`contains` of each key, in their order; a store with a question for many asks it once."""
        return [self.contains(key) for key in keys]

    def delete_many(self, keys: Sequence[str]) -> None:
        """`delete` of each key; if it raises, some may be gone."""
        for key in keys:
            self.delete(key)

    def put_over(self, key: str, blob: Buffers, victims: Sequence[str]) -> None:
        """Forget `victims` and keep `blob`: a store may have it take the place of one of them, which is less work.

        They are gone on return. `key` is none of them. If this raises, any of it may have happened, but `put` is all or
        nothing here too.
        """
        self.delete_many(victims)
        self.put(key, blob)

    def create(self, key: str, blob: Buffers) -> bool:
        """Optional: `put` only if there is nothing under `key`; whether it did. Exclusive among all writers.

        All or nothing, as `put`. Raises NotImplementedError where the store has no such thing.
        """
        raise NotImplementedError(f"{type(self).__name__} has no exclusive create")

    # -- at start ----------------------------------------------------------------------------------------------------

    def register(self, memory: memoryview) -> None:
        """Get to know the memory that blobs are read into and raw ones are written from: the pool of the engine.

        For stores whose transfers want that beforehand. Called once, before anything else; not where no KV is moved.
        Other memory may be given all the same. It stays valid until `close`, and is not to be touched here: most of it
        is not there yet.
        """

    def identity(self) -> str | None:
        """The identity of this store, whatever its settings call it; None if unknown.

        Two instances of one class with the same answer are on the same store, and the core refuses them in one engine.
        """
        return None

    def check_writable(self) -> None:
        """Raise OSError, or ValueError with what to do about it, if nothing can be put here.

        Called once the store is open, unless the tier is only read. It changes no blob and leaves none behind.
        """

    # -- for stores that several processes share, or that outlive one --------------------------------------------------

    def touch_many(self, keys: Sequence[str]) -> None:
        """Record that blobs were used, for `Entry.used` of later scans. The default records nothing.

        keys: least recently used first; a store with precise times keeps that order. Missing keys are skipped, and no
        blob is made. It must be cheap, because every hit calls it.
        """

    def hold(self, name: str) -> bool:
        """Acquire the right `name`, which one process at a time may have of those that share the store. Return whether
        it is held.

        name: of `[A-Za-z0-9._-]`. It is held until `close` or the end of the process. Never waits. Asking again while
        holding it returns True. Two instances in one process exclude each other too. The right's record in the store is
        not a blob. A lease that detects the end of a process lasts ten seconds at most. The default returns True, which
        suits stores that are not shared; without `hold`, each process that shares a store evicts on its own. Raise if
        this process can never have the right, whoever else has it: the tier's health then says so. A process without
        permission to write to the store must neither get the right nor block others from it.
        """
        return True
