"""A listing of a store in little memory, read again in order of use."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvloom.types import ChunkKey, Entry

SLICE = 1000
"""How many rows are worked on before others get their turn."""

_DEEPEST = (1 << 31) - 1
_LAST_MINUTE = (1 << 31) - 1


class Listed(NamedTuple):
    """A blob of ours in a listing. Times are seconds since the epoch, not later than now, 0.0 where unknown."""

    key: ChunkKey
    bytes: int
    written: float
    used: float
    """The later of when it was written and when it was used."""


def slices(entries: Iterable[Entry], now: float) -> Iterator[list[Listed]]:
    """What is ours of a listing, some at a time. What has no name of ours is left out."""
    entries = iter(entries)
    while some := list(islice(entries, SLICE)):
        yield [listed for entry in some if (listed := _listed(entry, now)) is not None]


def _listed(entry: Entry, now: float) -> Listed | None:
    try:
        key = ChunkKey.parse(entry.key)
    except ValueError:
        return None
    if key.depth > _DEEPEST:
        return None
    # Neither nan nor a clock that is ahead of ours may do harm.
    written = min(entry.modified, now) if entry.modified > 0 else 0.0
    used = min(entry.used, now) if entry.used > 0 else 0.0
    return Listed(key, max(0, entry.bytes), written, max(written, used))


class Listing:
    """Sixty bytes a blob."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._order = array("q")
        self._bytes = array("q")
        self._written = array("d")
        self._used = array("d")
        self._namespace = array("i")
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}

    def add(self, some: Iterable[Listed]) -> None:
        for key, nbytes, written, used in some:
            number = self._numbers.get(key.namespace)
            if number is None:
                number = self._numbers[key.namespace] = len(self._names)
                self._names.append(key.namespace)
            minute = min(int(used) // 60, _LAST_MINUTE)
            self._digests += key.digest
            self._order.append(minute << 31 | _DEEPEST - key.depth)
            self._bytes.append(nbytes)
            self._written.append(written)
            self._used.append(used)
            self._namespace.append(number)

    def in_order(self, *, newest_first: bool) -> Iterator[list[Listed]]:
        """All of it, some at a time, by the minute in which it was used; of one minute, the deeper is the older."""
        order = np.frombuffer(self._order, dtype=np.int64).argsort(kind="stable")
        if newest_first:
            order = order[::-1]
        for start in range(0, len(order), SLICE):
            yield [self._at(place) for place in order[start : start + SLICE].tolist()]

    def _at(self, place: int) -> Listed:
        depth = _DEEPEST - (self._order[place] & _DEEPEST)
        digest = bytes(self._digests[32 * place : 32 * place + 32])
        key = ChunkKey(self._names[self._namespace[place]], depth, digest)
        return Listed(key, self._bytes[place], self._written[place], self._used[place])
