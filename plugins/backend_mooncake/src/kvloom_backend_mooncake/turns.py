"""One change of a key at a time within one client.

Mooncake distinguishes writers by client, not by call. If two threads of one client replace a key, the master takes the
end of one's placeholder for the end of the other's blob, which is then shown before it is written, and the placeholder
is written into its memory. Between clients the master prevents that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from kvloom import BackendError


class Turns:
    """Lets one thread at a time change a key."""

    def __init__(self, timeout: float) -> None:
        """timeout: how long to wait for one's turn, seconds."""
        self._timeout = timeout
        self._changed = threading.Condition()
        self._busy: set[str] = set()

    @contextlib.contextmanager
    def of(self, keys: Iterable[str]) -> Iterator[None]:
        """Keep other threads from changing any of `keys` meanwhile. Raises BackendError if one does for too long."""
        wanted = frozenset(keys)
        with self._changed:
            if not self._changed.wait_for(lambda: self._busy.isdisjoint(wanted), self._timeout):
                raise BackendError(f"another call has been changing the same keys for {self._timeout:g} s")
            self._busy |= wanted  # all at once: two calls with keys in common never wait for each other
        try:
            yield
        finally:
            with self._changed:
                self._busy -= wanted
                self._changed.notify_all()
