"""To which blobs something happened lately: what was learnt of one before that is out of date."""

from __future__ import annotations

from collections import OrderedDict

KEPT = 4096


class ChangeLog:
    """The moments, counted upwards, at which something happened to blobs: the last `KEPT` of them. Not thread-safe."""

    def __init__(self) -> None:
        self._moments: OrderedDict[bytes, int] = OrderedDict()
        self._dropped = 0

    def note(self, digest: bytes, moment: int) -> None:
        """It happens now. moment: larger than any before."""
        self._moments.pop(digest, None)
        self._moments[digest] = moment
        if len(self._moments) > KEPT:
            self._dropped = self._moments.popitem(last=False)[1]

    def after(self, digest: bytes, since: int) -> bool:
        """Whether it happened after the moment `since`, or may have: that can be too long ago to tell."""
        return self._dropped > since or self._moments.get(digest, 0) > since
