"""Rows in order of use: doubly linked rings in arrays, so that a row's place costs eight bytes and no object."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from kvloom.tiers.index.columns import CURSOR, FREE, PENDING, Columns


class Links:
    """Neighbours of each row. Several rings may share one pair of columns: a row is in one at most."""

    def __init__(self, rows: Columns) -> None:
        self.before: array[int] = rows.column("i")
        self.after: array[int] = rows.column("i")
        """0: the row is in no ring."""

    def ring(self, end: int) -> None:
        """Make `end` a ring of its own."""
        self.before[end] = self.after[end] = end

    def insert(self, row: int, *, before: int) -> None:
        last = self.before[before]
        self.after[last] = self.before[before] = row
        self.before[row], self.after[row] = last, before

    def take_out(self, row: int) -> None:
        """From whichever ring it is in, if any."""
        last, following = self.before[row], self.after[row]
        if following:
            self.after[last], self.before[following] = following, last
            self.after[row] = 0


class Ring:
    """Rows from the least to the most recently used.

    Rows that must not be evicted keep their places, but are passed over only once: the ring has a hand, and no row
    before it may be evicted.
    """

    def __init__(self, rows: Columns, links: Links) -> None:
        self._rows = rows
        self._links = links
        self._end = rows.take()
        self._hand = rows.take()
        links.ring(self._end)
        links.insert(self._hand, before=self._end)

    def close(self) -> None:
        """The ring is empty and will not be used again."""
        for row in (self._hand, self._end):
            self._links.take_out(row)
            self._rows.give(row)

    def add_newest(self, row: int) -> None:
        self._links.insert(row, before=self._end)

    def put_behind(self, row: int, newer: int) -> None:
        """Move a row that must not be evicted now right before `newer`."""
        self._links.take_out(row)
        self._links.insert(row, before=newer)

    def add_oldest(self, rows: Iterable[int]) -> None:
        """Each of the rows becomes the least recent of all, one after the other."""
        self.rewind()
        before, after, hand = self._links.before, self._links.after, self._hand
        following = after[hand]
        for row in rows:
            before[following], after[row] = row, following
            following = row
        before[following], after[hand] = hand, following

    def renew(self, rows: Iterable[int]) -> None:
        """Mark rows as used; the last becomes the most recent. Zeros are skipped.

        Rows that follow each other in the ring already, as the chunks of a chain do, move all at once.
        """
        before, after, end = self._links.before, self._links.after, self._end
        first = last = 0
        for row in (*rows, 0):
            if after[last] != row:
                following = after[last]
                if first and following != end:
                    left, newest = before[first], before[end]
                    after[left], before[following] = following, left
                    after[newest], before[first] = first, newest
                    after[last], before[end] = end, last
                first = row
            last = row

    def oldest(self) -> int:
        """The least recently used row that may be evicted; 0 if there is none."""
        after, state = self._links.after, self._rows.state
        row = first = after[self._hand]
        while state[row] >= PENDING:
            row = after[row]
        if row != first:
            self._links.take_out(self._hand)
            self._links.insert(self._hand, before=row)
        return 0 if row == self._end else row

    def from_oldest(self) -> Iterator[int]:
        """The rows that may be evicted, least recently used first."""
        after, state = self._links.after, self._rows.state
        row = after[self._hand]
        while row != self._end:
            if state[row] < PENDING:
                yield row
            row = after[row]

    def rewind(self) -> None:
        """Move the hand to the start, because a row that was passed over may be evicted now."""
        first = self._links.after[self._end]
        if first != self._hand:
            self._links.take_out(self._hand)
            self._links.insert(self._hand, before=first)

    # -- walking, while others go on using the ring --------------------------------------------------------------------

    def open_cursor(self) -> int:
        """A place before all rows. Close it."""
        cursor = self._rows.take()
        self._rows.state[cursor] = CURSOR
        self._links.insert(cursor, before=self._links.after[self._end])
        return cursor

    def advance(self, cursor: int, count: int) -> list[int]:
        """The next rows behind the cursor, which then is behind them; fewer than `count` at the end of the ring.

        A row that is used meanwhile comes once more.
        """
        after, state = self._links.after, self._rows.state
        passed: list[int] = []
        row = after[cursor]
        while row != self._end and len(passed) < count:
            if state[row] not in (FREE, CURSOR):
                passed.append(row)
            row = after[row]
        self._links.take_out(cursor)
        self._links.insert(cursor, before=row)
        return passed

    def close_cursor(self, cursor: int) -> None:
        self._links.take_out(cursor)
        self._rows.give(cursor)
