"""The free parts of an address range: best fit in O(log n), neighbours merged, nothing scanned."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


class Extents:
    """Free extents of `[0, size)`; none crosses one of `cuts`. Not thread-safe: the pool holds its lock."""

    def __init__(self, size: int, cuts: Iterable[int] = ()) -> None:
        self.size = size
        self._cuts = frozenset(cuts)
        self.free_bytes = 0
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        # For each length that occurs, the starts of that length; a dict, because it is an ordered set.
        self._starts: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []
        # From the end, so that the first of equal ones is taken first: unused memory has no pages yet.
        for start in sorted({0, *self._cuts}, reverse=True):
            if size > start:
                self._add(start, size - start)
                size = start

    @property
    def largest(self) -> int:
        """The longest free extent."""
        return self._lengths[-1] if self._lengths else 0

    @property
    def widest(self) -> tuple[int, int]:
        """Start and end of one of the longest free extents; (0, 0) if there is none."""
        if not self._lengths:
            return 0, 0
        start = next(iter(self._starts[self._lengths[-1]]))
        return start, self._end_of[start]

    def take(self, size: int) -> int | None:
        """The start of `size` bytes that were free and no longer are, or None."""
        index = bisect_left(self._lengths, size)
        if index == len(self._lengths):
            return None
        length = self._lengths[index]
        # The extent freed last: its pages are the likeliest to be in memory.
        start = next(reversed(self._starts[length]))
        self._remove(start, length)
        if length > size:
            self._add(start + size, length - size)
        return start

    def give(self, start: int, size: int) -> None:
        """Make `[start, start + size)` free again."""
        end = start + size
        assert 0 <= start < end <= self.size and start not in self._end_of
        before = None if start in self._cuts else self._start_of.get(start)
        if before is not None:
            self._remove(before, start - before)
            start = before
        after = None if end in self._cuts else self._end_of.get(end)
        if after is not None:
            self._remove(end, after - end)
            end = after
        self._add(start, end - start)

    def _add(self, start: int, length: int) -> None:
        self._end_of[start] = start + length
        self._start_of[start + length] = start
        starts = self._starts.get(length)
        if starts is None:
            starts = self._starts[length] = {}
            insort(self._lengths, length)
        starts[start] = None
        self.free_bytes += length

    def _remove(self, start: int, length: int) -> None:
        del self._end_of[start]
        del self._start_of[start + length]
        starts = self._starts[length]
        del starts[start]
        if not starts:
            del self._starts[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self.free_bytes -= length
