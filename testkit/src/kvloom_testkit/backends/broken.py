"""A blob that cannot be read to its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvloom import Buffer


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
