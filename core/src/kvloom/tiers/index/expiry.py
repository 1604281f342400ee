"""Expired blobs: rows ordered by the time of writing, O(1) each in any order of arrival.

Times are cut into slots of a thousandth of the time to live, with a ring of rows in each. A blob counts as expired to
the second, but is handed out for deletion only when all of its slot is past.
"""

from __future__ import annotations

import heapq
from array import array

from kvloom.tiers.index.columns import Columns
from kvloom.tiers.index.lru import Links

_SLOTS = 1024


class Expiry:
    """Rows in order of writing. Times are seconds since the epoch."""

    def __init__(self, rows: Columns, ttl: float) -> None:
        self.ttl = ttl
        self.written: array[float] = rows.column("d")
        self._rows = rows
        self._links = Links(rows)
        self._slot_seconds = ttl / _SLOTS
        self._rings: dict[int, int] = {}
        """From the number of a slot to the end of its ring."""
        self._slots: list[int] = []
        """A heap of their numbers."""

    def put(self, row: int, written: float, now: float) -> None:
        """Give a row its place, wherever it was before. A time that is yet to come counts as now."""
        self.remove(row)
        self.written[row] = written = min(written, now)
        # All that is past goes into one slot, so that there are never many.
        slot = int(max(written, now - self.ttl - 2 * self._slot_seconds) // self._slot_seconds)
        end = self._rings.get(slot)
        if end is None:
            end = self._rings[slot] = self._rows.take()
            self._links.ring(end)
            heapq.heappush(self._slots, slot)
        self._links.insert(row, before=end)

    def remove(self, row: int) -> None:
        self._links.take_out(row)

    def forget(self, row: int) -> None:
        """Take a row out before it is freed."""
        self._links.take_out(row)
        self.written[row] = 0.0

    def oldest(self, now: float) -> int:
        """An expired row, of those written first; 0 if there is none."""
        while self._slots and (self._slots[0] + 1) * self._slot_seconds + self.ttl <= now:
            end = self._rings[self._slots[0]]
            row = self._links.after[end]
            if row != end:
                return row
            del self._rings[heapq.heappop(self._slots)]
            self._links.take_out(end)
            self._rows.give(end)
        return 0
