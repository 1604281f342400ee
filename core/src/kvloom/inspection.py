"""Look into the stored tiers of a configuration, beside the engines that use them: the public API for tools.

    resolved = kvloom.check_config(kvloom.EngineConfig.from_file("engine.yaml"))
    for choice in inspection.stored(resolved):
        with inspection.opened(choice) as store:
            print(store.name, sum(entry.bytes for _, entry in store.blobs()))

Every call of a backend ends with the tier's deadline, and every read has a bound. No torch is imported, unless a
plugin that the configuration names does so.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvloom.bounded import get_at_most
from kvloom.config import BlendBlock, Choice, MemoryBlock, Resolved, SerializerBlock, StoredBlock, TierChoice
from kvloom.errors import BackendError, ConfigError, CorruptBlobError, IncompleteListingError, UnreadableBlobError
from kvloom.format import envelope
from kvloom.format.encryption import Protection
from kvloom.runtime import Call, SystemRuntime, Workers
from kvloom.tiers.index.eviction_history import MAX_RECORD_BYTES, RECORD, Eviction, Evictions, parse
from kvloom.tiers.index.frequency import Sketch
from kvloom.types import ChunkKey, Entry

if TYPE_CHECKING:
    from kvloom.contracts.storage import StorageBackend
    from kvloom.types import KVSpec, MemoryFormat

__all__ = [
    "RECORDS",
    "BlendBlock",
    "Choice",
    "Eviction",
    "Evictions",
    "MemoryBlock",
    "Protection",
    "Records",
    "Resolved",
    "SerializerBlock",
    "Sketch",
    "Store",
    "StoredBlock",
    "TierChoice",
    "at_once",
    "chunk_key",
    "identity",
    "in_time",
    "opened",
    "pool_bytes",
    "stored",
    "stored_bytes",
]

T = TypeVar("T")
K = TypeVar("K")

RECORDS = "spec/"
"""Prefix of the records in a tier: for each fingerprint, the values that it is a digest of."""

_RUNTIME = SystemRuntime()
_RECORD_NAME = re.compile(rf"{RECORDS}([0-9a-f]{{32}})\.json")
_RECORD_BYTES = 64 << 10
"""Maximum size of a record. Ours have some KiB; one with eight adapters and the factors of a LongRoPE for each of two
kinds of layers has 24."""
_RECORDS_BYTES = 4 << 20
"""Maximum size of all that are read of a store. As JSON values they may take 25 times as much."""
_LEAST_RECORD_BYTES = 4 << 10
"""A smaller one counts as this many, so that the number of records has a bound, too."""
_BATCH = 1000
"""Entries of a listing that must arrive within one deadline."""


class Records(dict[str, dict[str, Any]]):
    """Records of models, `{"identity": ..., "spec": ...}`, by fingerprint."""

    left_out: int = 0
    """The number of records that were not read: they are too long, or there are too many before them."""


@dataclass(frozen=True, slots=True)
class Store:
    """An open stored tier. Every method raises BackendError if the backend fails or exceeds the tier's deadline."""

    choice: TierChoice
    backend: StorageBackend
    _workers: Workers = field(repr=False)

    @property
    def name(self) -> str:
        return self.choice.name

    def ask(self, function: Callable[[], T]) -> T:
        """Return the result of `function`, which calls the backend."""
        with self._errors():
            return self._workers.run(function, seconds=self.choice.deadline)

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """List the store. If a part cannot be listed, the error comes after the rest."""
        listing = self.ask(lambda: iter(self.backend.scan(prefix)))
        unread: list[IncompleteListingError] = []

        def some() -> list[Entry]:
            batch: list[Entry] = []
            try:
                batch.extend(islice(listing, _BATCH))
            except IncompleteListingError as error:
                unread.append(error)
            return batch

        while batch := self.ask(some):
            yield from batch
        with self._errors():
            if unread:
                raise unread[0]

    def blobs(self) -> Iterator[tuple[ChunkKey, Entry]]:
        """List the chunks in the store."""
        for entry in self.entries():
            key = chunk_key(entry.key)
            if key is not None:
                yield key, entry

    def records(self) -> Records:
        """Read the records of models. What is no record is not among them."""
        found, room = Records(), _RECORDS_BYTES
        for entry in self.entries(RECORDS):
            name = _RECORD_NAME.fullmatch(entry.key)
            if name is None:
                continue
            # The size says little: a file with holes takes up less than it is long.
            fits = room > 0 and entry.bytes <= _RECORD_BYTES
            blob = self._record(entry.key, _RECORD_BYTES) if fits else None
            if blob is None:
                found.left_out += 1
                continue
            room -= max(len(blob), _LEAST_RECORD_BYTES)
            record = _parsed(bytes(blob))
            if record is not None:
                found[name[1]] = record
        return found

    def evictions(self) -> Evictions | None:
        """Read the history of evictions; None if there is none that can be read."""
        record = self._record(RECORD, MAX_RECORD_BYTES)
        return None if record is None else parse(bytes(record))

    def header(self, key: str) -> envelope.Header | None:
        """Read the header of a blob; None if there is no blob.

        Calls the backend in this thread, without a deadline: wrap it in `ask` or `at_once`. Raises what the backend
        raises, CorruptBlobError and UnreadableBlobError.
        """
        page = memoryview(bytearray(envelope.ALIGN_BYTES))
        if not self.backend.get_range(key, 0, page):
            if not self.backend.contains(key):
                return None
            raise CorruptBlobError("the blob is cut short")
        length = envelope.header_bytes(page)
        if length > len(page):
            page = memoryview(bytearray(length))
            if not self.backend.get_range(key, 0, page):
                raise CorruptBlobError("the blob is cut short")
        return envelope.parse(page, key=key, protection=self.choice.protection)

    def _record(self, name: str, most: int) -> bytes | bytearray | None:
        """A small record, None if there is none or something else lies there."""

        def read() -> bytes | bytearray | None:
            with contextlib.suppress(CorruptBlobError, UnreadableBlobError):
                return get_at_most(self.backend, name, most)
            return None

        return self.ask(read)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """A backend may raise anything; here that is one line."""
        try:
            yield
        except Exception as error:
            raise BackendError(f"tier {self.name}: {type(error).__name__}: {error}") from error


def chunk_key(text: str) -> ChunkKey | None:
    """The key, or None if `text` is something else that lies in a store."""
    try:
        return ChunkKey.parse(text)
    except ValueError:
        return None


@contextmanager
def opened(choice: TierChoice, spec: KVSpec | None = None, *, threads: int = 1, made: bool = True) -> Iterator[Store]:
    """Open one stored tier. Raises ConfigError if it cannot be opened, BackendError if that takes too long.

    made: create a directory that is missing; without it, a missing directory is an error.
    """
    assert choice.backend is not None
    place = getattr(choice.backend.config, "path", None)
    make, seconds = choice.backend.make, choice.deadline
    # A call that hangs may have every thread; closing gets one of its own, and the process does not wait for it.
    with _workers(choice, threads) as workers, _workers(choice, 1) as closing:
        looks = partial(_exists, choice, place) if not made and isinstance(place, Path) else None
        if looks is not None and not workers.run(looks, seconds=seconds):
            text = f"there is no directory {str(place)!r}: nothing was stored there yet, or the path is wrong"
            raise ConfigError(f"{choice.path}.path", text)
        backend: StorageBackend = workers.run(lambda: make(spec), seconds=seconds)
        try:
            yield Store(choice, backend, workers)
        finally:
            with contextlib.suppress(Exception):
                closing.run(backend.close, seconds=seconds)


def _exists(choice: TierChoice, place: Path) -> bool:
    try:
        return place.expanduser().exists()
    except OSError as error:
        raise ConfigError(f"{choice.path}.path", f"cannot look at {place}: {error.strerror}") from error


def in_time(choice: TierChoice, function: Callable[[], T]) -> T:
    """Run a function that looks at a tier's place, which may hang. Raises BackendError after the tier's deadline."""
    with _workers(choice, 1) as workers:
        return workers.run(function, seconds=choice.deadline)


@contextmanager
def _workers(choice: TierChoice, threads: int) -> Iterator[Workers]:
    workers = Workers(_RUNTIME, name=f"tier {choice.name}", threads=threads)
    try:
        yield workers
    finally:
        workers.close(0.0)


def stored(resolved: Resolved, only: str | None = None) -> list[TierChoice]:
    """The stored tiers of a configuration, or the one named `only`. Raises ConfigError if there is none."""
    choices = [choice for choice in resolved.tiers if choice.backend is not None]
    if not choices:
        raise ConfigError("tiers", "only a memory tier, which no other process can read; add a stored tier")
    if only is not None:
        names = ", ".join(choice.name for choice in choices)
        choices = [choice for choice in choices if choice.name == only]
        if not choices:
            raise ConfigError("--tier", f"no stored tier is called {only!r}; there are: {names}")
    return choices


def at_once(
    calls: Iterable[tuple[K, Callable[[], T]]], *, seconds: float, threads: int
) -> Iterator[tuple[K, T | Exception]]:
    """Run calls in parallel, each within `seconds`; yield their results or errors in order. Few start ahead.

    Raises BackendError once every thread is held by a call that is too late.
    """
    workers = Workers(_RUNTIME, name="kvloom-command", threads=threads)
    waiting: deque[tuple[K, Call[T]]] = deque()

    def first() -> tuple[K, T | Exception]:
        name, call = waiting.popleft()
        try:
            return name, call.result()
        except Exception as error:
            return name, error

    try:
        for name, function in calls:
            waiting.append((name, workers.submit(function, seconds=seconds)))
            if len(waiting) >= 2 * threads:
                yield first()
        while waiting:
            yield first()
    finally:
        workers.close(0.0)


def identity(spec: KVSpec, format: MemoryFormat, representation: Mapping[str, Any]) -> dict[str, Any]:
    """The values that `kvloom.fingerprint` of the same arguments is a digest of."""
    from kvloom import keys

    return keys.identity(spec, format, representation)


def stored_bytes(nbytes: int) -> int:
    """Bytes of a tier's capacity that a blob of `nbytes` takes."""
    from kvloom.memory import pages_of

    return pages_of(nbytes)


def pool_bytes(nbytes: int, capacity: int) -> int:
    """Bytes that a chunk of `nbytes` takes of a memory tier of `capacity` bytes."""
    from kvloom.memory.pool import taken_by

    return taken_by(nbytes, capacity, largest_bytes=capacity)


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and all(isinstance(record.get(part), dict) for part in ("identity", "spec"))
    named = whole and all(isinstance(record["spec"].get(name, ""), str) for name in ("model", "revision"))
    return {part: record[part] for part in ("identity", "spec")} if named else None
