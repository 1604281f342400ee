"""The rows of a ledger, in columns: ten million of them cost no object that the garbage collector would visit.

A row is a number. The row of a digest is found in one of 256 dictionaries, so that none of them ever grows for long.
Row 0 is no row. Not thread-safe: the ledger's lock is held.
"""

from __future__ import annotations

from array import array
from typing import Any

FREE, UNKNOWN, EXACT, LOSSY, UNREADABLE, LATER, PENDING, WRITING, CURSOR = 0, 1, 2, 3, 4, 5, 6, 7, 13
"""States of a row. UNKNOWN to LATER: the blob is there. WRITING + one of these, or + FREE: it is being written,
over a blob of that kind or over none. CURSOR: no blob, but a place in a ring. From PENDING on a row must not go."""

_STEP = 1024
_DIGEST_BYTES = 32


class Columns:
    """Columns that grow together, and the index from digests to rows."""

    def __init__(self) -> None:
        self._columns: list[array[Any]] = []
        self._digests = bytearray(_STEP * _DIGEST_BYTES)
        self._free = array("i")
        self._shards: list[dict[bytes, int]] = [{} for _ in range(256)]
        self.find = [shard.get for shard in self._shards]
        """`find[digest[0]](digest, 0)` is the row of a digest, 0 if there is none."""
        self.end = 1
        """No row from here on was ever used."""
        self.state: array[int] = self.column("B")
        self.bytes: array[int] = self.column("q")
        self.depth: array[int] = self.column("i")
        self.space: array[int] = self.column("i")
        """The number of the row's namespace."""
        self.seen: array[int] = self.column("B")
        """The listing during which, or after which, the blob was last known to be there."""
        self.shown: array[float] = self.column("d")
        """Last use of the blob that the store can show, in seconds since the epoch."""

    def column(self, typecode: str) -> array[Any]:
        """A new column of zeros. It stays the same object, and is as long as every other."""
        length = len(self._columns[0]) if self._columns else _STEP
        column: array[Any] = array(typecode)
        column.frombytes(bytes(length * column.itemsize))
        self._columns.append(column)
        return column

    def take(self) -> int:
        """A free row. Its columns hold what they held."""
        if self._free:
            return self._free.pop()
        if self.end == len(self.state):
            for column in self._columns:
                column.frombytes(bytes(_STEP * column.itemsize))
            self._digests += bytes(_STEP * _DIGEST_BYTES)
        self.end += 1
        return self.end - 1

    def give(self, row: int) -> None:
        """Free a row."""
        self.state[row] = FREE
        self._free.append(row)

    def add(self, digest: bytes) -> int:
        """A row that `find` finds from now on."""
        row = self._free.pop() if self._free else self.take()
        self._digests[row * _DIGEST_BYTES : (row + 1) * _DIGEST_BYTES] = digest
        self._shards[digest[0]][digest] = row
        return row

    def digest(self, row: int) -> bytes:
        return bytes(self._digests[row * _DIGEST_BYTES : (row + 1) * _DIGEST_BYTES])

    def remove(self, row: int, digest: bytes) -> None:
        """Free a row that was added. Its columns hold what they held."""
        del self._shards[digest[0]][digest]
        self.state[row] = FREE
        self._free.append(row)
