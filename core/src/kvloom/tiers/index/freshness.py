"""Times at which blobs were last known to be there, for stores that others write to or that evict by themselves.

Such a store is asked again after some time, and about everything after it has failed. Nothing else would tell: what the
ledger believes to be there is not written, and while it is a hit in memory it is not read either.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from kvloom.tiers.index.columns import FREE, PENDING, Columns
from kvloom.types import ChunkKey


class Freshness:
    """A time for each row of a ledger."""

    def __init__(
        self, rows: Columns, lock: AbstractContextManager[object], now: Callable[[], float], *, seconds: float
    ) -> None:
        """lock: the ledger's. seconds: how long a blob is believed to be there since it was last seen."""
        self._rows = rows
        self._lock = lock
        self._now = now
        self._seconds = seconds
        self._at: array[float] = rows.column("d")
        self._doubted = -math.inf

    def note(self, row: int) -> None:
        """The blob of this row is there. The lock is held."""
        self._at[row] = self._now()

    def confirm(self, keys: Iterable[ChunkKey]) -> None:
        """The store has just said that it has these."""
        with self._lock:
            for key in keys:
                self._at[self._row(key)] = self._now()

    def doubt(self) -> None:
        """The store has failed: what was seen before says nothing about what is there when it is back."""
        self._doubted = self._now()

    def doubtful(self, keys: Iterable[ChunkKey]) -> list[bool]:
        """Return which of these are taken to be there, and should be asked about again."""
        state, at = self._rows.state, self._at
        since = max(self._doubted, self._now() - self._seconds)
        with self._lock:
            rows = [self._row(key) for key in keys]
            return [FREE < state[row] < PENDING and at[row] <= since for row in rows]

    def _row(self, key: ChunkKey) -> int:
        return self._rows.find[key.digest[0]](key.digest, 0)
