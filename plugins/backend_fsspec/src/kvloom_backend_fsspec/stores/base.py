"""A store of named objects, as the backend needs it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from kvloom import BackendError, CorruptBlobError, Sink
from kvloom_backend_fsspec.unread import Unread

MOST_DIRECTORIES = 1 << 16
"""In one listing: a server that follows links shows two that lead back as more directories than can be listed."""


class Directories:
    """Directories that a listing looks into, the nearest first: blobs before what a loop of links repeats."""

    def __init__(self, first: str, unread: Unread, *, name: Callable[[str], str] = str) -> None:
        """name: returns the name of a directory, which `unread` is told if there are too many."""
        self._pending = deque([first])
        self._left = MOST_DIRECTORIES
        self._unread, self._name = unread, name

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, directory: str) -> None:
        """Look into it later. One that is too many is noted when its turn comes, and others are forgotten."""
        if len(self._pending) <= self._left:
            self._pending.append(directory)

    def __iter__(self) -> Iterator[str]:
        while self._pending:
            inside = self._pending.popleft()
            if not self._left:
                error = BackendError(f"behind {MOST_DIRECTORIES} directories: a link loop?")
                self._unread.note(self._name(inside), error)
                return
            self._left -= 1
            yield inside


class Listed(NamedTuple):
    """One object in a listing."""

    name: str
    bytes: int
    modified: float
    """Seconds since the epoch; 0.0 where the store does not say."""
    tag: str
    """Another one for other content, where the store has such a thing; else empty."""


class ObjectStore(Protocol):
    """Objects by name, in a bucket or below a directory. Raises BackendError, with what to do, when something fails."""

    def put(self, name: str, data: bytes) -> None:
        """Replace the object, all or nothing."""

    def create(self, name: str, data: bytes) -> bool:
        """Put it if there is none, exclusively; whether it did."""

    def get(self, name: str) -> bytes | None:
        """The object, or None."""

    def read(self, name: str, sink: Sink) -> bool:
        """The object into memory that `sink` gives; False if there is none."""

    def read_range(self, name: str, offset: int, into: memoryview) -> bool:
        """Fill `into`, which is not empty, from `offset`; False if there is no object or it ends before."""

    def size(self, name: str) -> int | None:
        """Its bytes, or None if there is no object."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; missing ones are skipped."""

    def list(self, directory: str) -> Iterator[Listed]:
        """Every object below `directory`, which is empty for all.

        Skips single places that cannot be read, and raises IncompleteListingError at the end.
        """

    def close(self) -> None:
        """Release everything."""


class Memory:
    """A sink of its own memory."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._room = bytearray()

    def reserve(self, num_bytes: int) -> memoryview:
        if self.max_bytes is not None and num_bytes > self.max_bytes:
            raise CorruptBlobError(f"{num_bytes} bytes; the limit is {self.max_bytes}")
        self._room = bytearray(num_bytes)
        return memoryview(self._room)

    def filled(self, num_bytes: int) -> None:
        pass

    @property
    def data(self) -> Any:
        return self._room
