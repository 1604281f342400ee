"""A listing of a store in little memory, read again in order of use."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from kvloom.types import Entry

SLICE = 1000
"""Number of blobs that are handled before the lock is released."""

Listed = tuple[str, int, bytes, int, float, float]
"""A blob of ours: namespace, depth and digest of its key; bytes; when it was written; the later of that and when it was
used. Times are seconds since the epoch, not later than now, 0.0 where unknown. No class: there are millions of them."""

_DEEPEST = (1 << 31) - 1
_LAST_MINUTE = (1 << 31) - 1
_MOST_BYTES = 1 << 62
_RECORD = struct.Struct("<q32sqddi")
"""Its place in the order, digest, bytes, times, and the number of its namespace."""
_DIGEST_CHARS = 64


def slices(entries: Iterable[Entry], now: float) -> Iterator[list[Listed]]:
    """Yield the blobs of a listing in slices. Files without a name of ours are left out."""
    entries = iter(entries)
    while some := list(islice(entries, SLICE)):
        yield [listed for entry in some if (listed := _listed(entry, now)) is not None]


def _listed(entry: Entry, now: float) -> Listed | None:
    text, nbytes, modified, used = entry
    # As ChunkKey.parse, but several times as fast.
    namespace, _, depth = text[: -_DIGEST_CHARS - 1].rpartition("/")
    try:
        number, digest = int(depth), bytes.fromhex(text[-_DIGEST_CHARS:])
    except ValueError:
        return None
    if f"{namespace}/{number}-{digest.hex()}" != text or not 0 <= number <= _DEEPEST or namespace.count("/") != 1:
        return None
    # Neither nonsense nor a clock that is ahead of ours may do harm.
    nbytes = min(max(nbytes, 0), _MOST_BYTES)
    written = (modified if modified < now else now) if modified > 0 else 0.0
    if used > written:
        return namespace, number, digest, nbytes, written, used if used < now else now
    return namespace, number, digest, nbytes, written, written


class Listing:
    """Seventy bytes a blob."""

    def __init__(self) -> None:
        self._records = bytearray()
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}

    def add(self, some: Iterable[Listed]) -> None:
        pack, numbers = _RECORD.pack, self._numbers
        for namespace, depth, digest, nbytes, written, used in some:
            number = numbers.get(namespace)
            if number is None:
                number = numbers[namespace] = len(self._names)
                self._names.append(namespace)
            minute = min(int(used) // 60, _LAST_MINUTE)
            self._records += pack(minute << 31 | _DEEPEST - depth, digest, nbytes, written, used, number)

    def in_order(self, *, newest_first: bool) -> Iterator[list[Listed]]:
        """All of it, some at a time, by the minute in which it was used; of one minute, the deeper is the older."""
        order = self._order()
        if newest_first:
            order = order[::-1]
        unpack, records, size, names = _RECORD.unpack_from, self._records, _RECORD.size, self._names
        for start in range(0, len(order), SLICE):
            some = [unpack(records, size * place) for place in order[start : start + SLICE].tolist()]
            yield [
                (names[number], _DEEPEST - (place & _DEEPEST), digest, nbytes, written, used)
                for place, digest, nbytes, written, used, number in some
            ]

    def _order(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        rest = _RECORD.size - 8
        return np.frombuffer(self._records, dtype=[("place", "<i8"), ("rest", f"V{rest}")])["place"].argsort(
            kind="stable"
        )
