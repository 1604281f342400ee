"""Helpers of requirements: a sink that records its use, a blob that cannot be read, and a call that fills a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvloom import BackendError, Buffer, Buffers, StorageBackend

_OPPOSITE = bytes(range(255, -1, -1))
"""For `bytes.translate`: the inverse of each byte."""


class RecordingSink:
    """A sink that records how it is used: memory with the inverse of the expected bytes, until they have arrived."""

    def __init__(
        self, expected: bytes | None = None, *, refusal: BackendError | None = None, late: bool = False
    ) -> None:
        """refusal: what it raises: when memory is asked for or, if it is `late`, when something has arrived."""
        self.expected = expected
        self.refusal = refusal
        self.late = late
        self.reserved: list[int] = []
        self.told: list[int] = []
        self.early: int | None = None
        """Number of bytes that were reported as arrived before they had; None if there were none."""
        self.memory = memoryview(b"")

    def reserve(self, num_bytes: int) -> memoryview:
        self.reserved.append(num_bytes)
        if self.refusal is not None and not self.late:
            raise self.refusal
        data = bytearray(num_bytes)
        if self.expected is not None:
            data[:] = self.expected[:num_bytes].ljust(num_bytes, b"\0").translate(_OPPOSITE)
        self.memory = memoryview(data)
        return self.memory

    def filled(self, num_bytes: int) -> None:
        self.told.append(num_bytes)
        if self.expected is not None and self.memory[:num_bytes] != self.expected[:num_bytes]:
            self.early = num_bytes
        if self.refusal is not None and self.late:
            raise self.refusal


class Broken(Exception):
    """The memory of a blob could not be read."""


class BrokenOfTheSystem(Broken, OSError):
    """The same, as a failure of the operating system."""


FAILURES = (Broken, BrokenOfTheSystem)


class BreaksHalfWay(Sequence[Buffer]):
    """Three buffers, of which the second cannot be read."""

    def __init__(self, part: bytes, failure: type[Broken] = Broken) -> None:
        self._part = part
        self._failure = failure

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Buffer:  # type: ignore[override]
        if index >= 3:
            raise IndexError(index)
        if index:
            raise self._failure
        return self._part

    def __iter__(self) -> Iterator[Buffer]:
        return (self[index] for index in range(3))


def put_all(backend: StorageBackend, items: Iterable[tuple[str, Buffers]]) -> None:
    """`put_many`; raises the first failure, once all are reported."""
    failures: list[Exception] = []

    def done(number: int, outcome: Exception | None) -> None:
        if outcome is not None:
            failures.append(outcome)

    backend.put_many(list(items), done)
    if failures:
        raise failures[0]
