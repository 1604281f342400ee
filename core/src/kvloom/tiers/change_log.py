"""A bounded log of changes, which tells whether what was read before is out of date."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class ChangeLog:
    """The last changes, numbered upwards, at most one of each subject.

    A reader takes a `mark` before it looks at something, and asks `after` before it relies on what it saw. One thread
    at a time writes. Reading takes no lock.
    """

    def __init__(self, most: int) -> None:
        """most: number of subjects to keep. A change that was dropped counts as a change of everything."""
        self._most = most
        self._moment = 0
        self._moments: OrderedDict[Hashable, int] = OrderedDict()
        self._dropped = 0

    def mark(self) -> int:
        """The number of the last change, for `after`."""
        return self._moment

    def note(self, *subjects: Hashable) -> None:
        """Log one change of these subjects."""
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
        """Return whether one of these changed after the mark `since`. True too if that is too long ago to tell."""
        if since == self._moment:
            return False
        return any(self._moments.get(subject, 0) > since for subject in subjects) or self._dropped > since
