"""The common part of the requirements of storage backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import pytest

from kvloom import Buffer, StorageBackend
from kvloom_testkit.conformance import Conformance
from kvloom_testkit.keys import Namespace
from kvloom_testkit.running import together


class Open(Protocol):
    """The fixture `opened`."""

    def __call__(self) -> StorageBackend: ...

    def close(self, made: StorageBackend) -> None:
        """Close it now, instead of at the end."""


Make = Callable[[], StorageBackend]
ANSWER_SECONDS = 10.0
"""Time limit for a few calls, after which they count as hanging."""
_CLEANING_SECONDS = 30.0


class Raw(Protocol):
    """A way into the store that does not lead through the backend."""

    def get(self, key: str) -> bytes | None: ...
    def set(self, key: str, blob: bytes) -> None: ...


class BackendRequirements(Conformance):
    """The fixtures of every class of requirements."""

    kind = "backend"
    contract = StorageBackend
    yours = Conformance.yours | {"raw"}

    @pytest.fixture(autouse=True)
    def names(self, make: Make) -> Iterator[Namespace]:
        """Keys of this test alone; their blobs are deleted at the end."""
        names = Namespace()
        yield names
        if names.used:
            together(lambda: _clean(make, sorted(names.used)), seconds=_CLEANING_SECONDS)

    @pytest.fixture
    def raw(self) -> Raw | None:
        """A way round the backend: override it if there is one."""
        return None


def again(backend: StorageBackend, opened: Open) -> StorageBackend:
    """Another instance on the same store, which has not seen what this one did; the same if there can be none.

    A store that is not shared is closed before it is opened again.
    """
    if type(backend).shared:
        return opened()
    if not type(backend).persistent:
        return backend
    opened.close(backend)
    return opened()


def content(blob: Buffer | None) -> bytes | None:
    """A backend's result as bytes, read as the core does, which takes a buffer and nothing else."""
    return None if blob is None else bytes(memoryview(blob).cast("B"))


def contents(blobs: Sequence[Buffer | None]) -> list[bytes | None]:
    return [content(blob) for blob in blobs]


def versions_of(size: int) -> Callable[[int], bytes]:
    """Makes blobs that tell by themselves whether they are whole: the n-th is its number again and again."""
    return lambda number: bytes([number % 251]) * (size + 997 * (number % 251))


def torn(blob: Any, version: Callable[[int], bytes]) -> bool:
    """Return whether a blob differs from every version."""
    data = content(blob) or b""
    return not data or data != version(data[0])


def _clean(make: Make, keys: Sequence[str]) -> None:
    backend = make()
    try:
        backend.delete_many(keys)
    finally:
        backend.close()
