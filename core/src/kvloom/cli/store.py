"""What the verbs that look into tiers share: the backends, asked with deadlines, and the records of what they hold."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvloom.bounded import get_at_most
from kvloom.errors import BackendError, ConfigError, CorruptBlobError, IncompleteListingError, UnreadableBlobError
from kvloom.runtime import Call, SystemRuntime, Workers
from kvloom.types import ChunkKey, Entry

if TYPE_CHECKING:
    from kvloom.config import Resolved, TierChoice
    from kvloom.contracts.storage import StorageBackend
    from kvloom.types import KVSpec

T = TypeVar("T")
K = TypeVar("K")

RECORDS = "spec/"
"""Where a tier keeps, for each fingerprint, what it is a digest of."""
QUARANTINE = "quarantine/"
"""Where `kvloom scrub` puts corrupt blobs: in front of their key."""
PROBES = "plan/"
"""Where `kvloom plan` puts what it measures with, for as long as that takes."""

RUNTIME = SystemRuntime()
_RECORD_BYTES = 256 << 10
"""Many times as much as a record of ours has."""
_BATCH = 1000
"""Entries of a listing that have to come within one deadline."""


@dataclass(frozen=True, slots=True)
class Store:
    """A stored tier, open. No call of its backend takes longer than the tier's deadline, as far as the caller waits."""

    choice: TierChoice
    backend: StorageBackend
    workers: Workers = field(repr=False)

    @property
    def name(self) -> str:
        return self.choice.name

    def ask(self, function: Callable[[], T]) -> T:
        """What `function`, which calls the backend, returns. BackendError if it raises or is too slow."""
        with self.errors():
            return self.workers.run(function, seconds=self.choice.deadline)

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """The listing. BackendError as `ask` raises it; if not all can be listed, after what can."""
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
        with self.errors():
            if unread:
                raise unread[0]

    def blobs(self) -> Iterator[tuple[ChunkKey, Entry]]:
        """The listing, of chunks only."""
        for entry in self.entries():
            key = chunk_key(entry.key)
            if key is not None:
                yield key, entry

    def records(self) -> dict[str, dict[str, Any]]:
        """`{"identity": ..., "spec": ...}` for each fingerprint; what is no such record is left out."""
        found = {}
        for entry in self.entries(RECORDS):
            name = entry.key
            if entry.bytes > _RECORD_BYTES:  # which says little: a file with holes takes up less than it is long
                continue
            blob = self.ask(lambda name=name: self.record(name, _RECORD_BYTES))  # type: ignore[misc]
            record = None if blob is None else _parsed(bytes(blob))
            if record is not None:
                found[name.removeprefix(RECORDS).removesuffix(".json")] = record
        return found

    def record(self, name: str, most: int) -> bytes | bytearray | None:
        """A small record, None if there is none or something else lies there. Calls the backend."""
        with contextlib.suppress(CorruptBlobError, UnreadableBlobError):
            return get_at_most(self.backend, name, most)
        return None

    @contextmanager
    def errors(self) -> Iterator[None]:
        """A backend may raise anything; here that is one line."""
        try:
            yield
        except Exception as error:
            raise BackendError(f"tier {self.name}: {said(error)}") from error


def said(error: BaseException) -> str:
    """An error in a few words."""
    return f"{type(error).__name__}: {error}"


def chunk_key(text: str) -> ChunkKey | None:
    """The key, unless `text` is something else that lies in a store."""
    try:
        return ChunkKey.parse(text)
    except ValueError:
        return None


@contextmanager
def opened(
    choice: TierChoice, spec: KVSpec | None = None, *, threads: int = 1, made: bool = True
) -> Iterator[Store]:  # fmt: skip
    """One stored tier. Raises ConfigError if it cannot be opened, BackendError if that takes too long.

    made: a directory that is not there is made; else that is an error, as it is for who only looks.
    """
    assert choice.backend is not None
    place = getattr(choice.backend.config, "path", None)
    if not made and isinstance(place, Path) and not place.expanduser().exists():
        text = f"there is no {str(place)!r}: nothing was stored there yet, or it is written otherwise"
        raise ConfigError(f"{choice.path}.path", text)
    make, seconds = choice.backend.make, choice.deadline
    workers = Workers(RUNTIME, name=f"tier {choice.name}", threads=threads)
    backend: StorageBackend = workers.run(lambda: make(spec), seconds=seconds)
    try:
        yield Store(choice, backend, workers)
    finally:
        # A call that hangs may have every thread; closing gets one of its own, and the process does not wait for it.
        with contextlib.suppress(Exception):
            Workers(RUNTIME, name=f"tier {choice.name}", threads=1).run(backend.close, seconds=seconds)
        workers.close(0.0)


@contextmanager
def for_a_try(choice: TierChoice) -> Iterator[TierChoice]:
    """The tier; where its directory is not there yet, one like it in a directory beside that is gone afterwards."""
    assert choice.backend is not None
    place = getattr(choice.backend.config, "path", None)
    if (
        not (isinstance(place, Path) or (isinstance(place, str) and os.sep in place))
        or Path(place).expanduser().exists()
    ):
        yield choice
        return
    path = Path(place).expanduser()
    there = next(parent for parent in path.parents if parent.exists())
    try:
        scratch = tempfile.mkdtemp(dir=there, prefix=".kvloom-try-")
    except OSError:  # opening the tier fails too, and says why
        yield choice
        return
    try:
        config = choice.backend.config.model_copy(update={"path": type(place)(os.path.join(scratch, path.name))})
        yield replace(choice, backend=replace(choice.backend, config=config))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def stores(
    resolved: Resolved, spec: KVSpec | None = None, *, only: str | None = None, threads: int = 1, made: bool = True
) -> Iterator[list[Store]]:
    """The stored tiers, in order, or the one that is called `only`. ConfigError if there is none to look into."""
    with ExitStack() as stack:
        yield [stack.enter_context(opened(one, spec, threads=threads, made=made)) for one in stored(resolved, only)]


def at_once(
    calls: Iterable[tuple[K, Callable[[], T]]], *, seconds: float, threads: int
) -> Iterator[tuple[K, T | Exception]]:
    """What the calls return or raise, in order, each within `seconds`; few are begun ahead.

    Raises BackendError once every thread is held by a call that is too late.
    """
    workers = Workers(RUNTIME, name="kvloom-command", threads=threads)
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


def stored(resolved: Resolved, only: str | None = None) -> list[TierChoice]:
    """The stored tiers of a configuration. ConfigError if there is none to look into."""
    choices = [choice for choice in resolved.tiers if choice.backend is not None]
    if not choices:
        raise ConfigError("tiers", "only memory, which no other process can see; there is nothing to look into")
    if only is not None:
        names = ", ".join(choice.name for choice in choices)
        choices = [choice for choice in choices if choice.name == only]
        if not choices:
            raise ConfigError("--tier", f"no stored tier is called {only!r}; there are: {names}")
    return choices


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and all(isinstance(record.get(part), dict) for part in ("identity", "spec"))
    named = whole and all(isinstance(record["spec"].get(name, ""), str) for name in ("model", "revision"))
    return record if named else None
