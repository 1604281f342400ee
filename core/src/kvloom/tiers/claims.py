"""Claims: of two that would do one thing for one chunk at one time, one does it and the other waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvloom.runtime import Runtime
from kvloom.types import ChunkKey


class Claims:
    """Which chunks somebody is copying in just now."""

    def __init__(self, runtime: Runtime) -> None:
        self._now = runtime.now
        self._changed = runtime.condition()
        self._taken: set[ChunkKey] = set()
        self._waiting = 0

    @contextmanager
    def of(self, keys: Sequence[ChunkKey]) -> Iterator[set[ChunkKey]]:
        """Claim those of `keys` that nobody has claimed: they are the caller's until the end of the block."""
        with self._changed:
            mine = set(keys) - self._taken
            self._taken |= mine
        try:
            yield mine
        finally:
            with self._changed:
                self._taken -= mine
                if self._waiting:
                    self._changed.notify_all()

    def wait(self, keys: Sequence[ChunkKey], until: float) -> bool:
        """Wait until nobody claims any of `keys`; False if `until` came first."""
        with self._changed:
            self._waiting += 1
            try:
                while not self._taken.isdisjoint(keys):
                    left = until - self._now()
                    if left <= 0:
                        return False
                    self._changed.wait(left)
                return True
            finally:
                self._waiting -= 1
