"""A bounded log of changes: what was learnt of something before it changed is out of date."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class ChangeLog:
    """The last changes, numbered upwards, at most one of each subject.

    Whoever learns something takes a `mark` before it looks, and asks `after` before it relies on what it saw. One
    thread at a time writes. Reading takes no lock.
    """

    def __init__(self, most: int) -> None:
        """most: how many subjects are kept; the changes of the others count as changes of everything."""
        self._most = most
        self._moment = 0
        self._moments: OrderedDict[Hashable, int] = OrderedDict()
        self._dropped = 0

    def mark(self) -> int:
        """Now, for `after`."""
        return self._moment

    def note(self, *subjects: Hashable) -> None:
        """These change together, now."""
        moments, moment = self._moments, self._moment + 1
        for subject in subjects:
            moments[subject] = moment
            moments.move_to_end(subject)
        while len(moments) > self._most:
            oldest = next(iter(moments))
            self._dropped = moments[oldest]  # first, so that a reader finds it here or there
            del moments[oldest]
        self._moment = moment

    def after(self, since: int, *subjects: Hashable) -> bool:
        """Return whether one of these changed after the mark `since`, or may have: that can be too long ago to tell."""
        if since == self._moment:
            return False
        return any(self._moments.get(subject, 0) > since for subject in subjects) or self._dropped > since
