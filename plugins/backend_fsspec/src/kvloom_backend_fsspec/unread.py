"""Collects the places that a listing could not read: the listing goes on, and reports them at its end."""

from __future__ import annotations

import errno

from kvloom import IncompleteListingError
from kvloom_backend_fsspec.names import Names

# A link to itself, or to too long a name, cannot have a blob below it.
NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_REFUSED = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)


class Unread:
    """Places that one listing has passed over."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._count = 0
        self._first = ""

    def note(self, place: str, error: BaseException) -> None:
        """A directory or an object could not be read. Where no key leads there is no blob: that does not count."""
        if getattr(error.__cause__ or error, "errno", None) in NOTHING_THERE or not self._names.may_hold(place):
            return
        self._count += 1
        self._first = self._first or f"{place} ({getattr(error, 'strerror', None) or error})"

    def end(self) -> None:
        """The listing is over. Raises IncompleteListingError if blobs may lie where it could not look."""
        if self._count:
            raise IncompleteListingError(f"{self._count} places cannot be read, the first: {self._first}")


def is_refused(error: BaseException) -> bool:
    """Return whether a store that answers refuses to show one place. Otherwise the store itself has failed."""
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status_code", 0)
    return status == 403 or getattr(error, "errno", None) in _REFUSED
