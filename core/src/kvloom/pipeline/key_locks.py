"""Locks on keys: of two threads that would store one chunk at the same time, one stores it and the other waits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from kvloom.runtime import Runtime
from kvloom.types import ChunkKey


class KeyLocks:
    """Locks on the keys of chunks that are being copied in."""

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

    def taken(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return which of `keys` somebody has claimed just now."""
        with self._changed:
            return self._taken & set(keys)

    def wait(self, keys: Sequence[ChunkKey], until: float) -> bool:
        """Wait until nobody holds any of `keys`; False if `until` came first."""
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


class Holder:
    """The keys that one layer-wise store has claimed, for as long as a forward pass. Made by `LongKeyLocks.take`."""

    __slots__ = ("at", "keys", "wanted")

    def __init__(self, at: float) -> None:
        self.at = at
        """Time of its last progress."""
        self.keys: set[ChunkKey] = set()
        self.wanted: set[ChunkKey] = set()
        """Those of its keys that other stores left out because of it."""


class LongKeyLocks:
    """Claims that last as long as a forward pass. Nobody waits for one: a second store leaves the chunk out.

    A holder without progress for `seconds` counts as abandoned, and others may claim its keys.
    """

    def __init__(self, runtime: Runtime, seconds: float) -> None:
        self._now = runtime.now
        self._seconds = seconds
        self._lock = runtime.lock()
        self._holders: dict[ChunkKey, Holder] = {}

    def take(self, keys: Sequence[ChunkKey]) -> Holder:
        """Claim those of `keys` that nobody has claimed; give them back with `give`."""
        now = self._now()
        new = Holder(now)
        with self._lock:
            for key in keys:
                old = self._holders.get(key)
                if old is not None and old.at + self._seconds >= now:
                    old.wanted.add(key)
                    continue
                new.keys.add(key)
                self._holders[key] = new
        return new

    def go_on(self, holder: Holder) -> None:
        """Note that a holder has made progress."""
        holder.at = self._now()

    def give(self, holder: Holder, keys: Collection[ChunkKey] | None = None) -> set[ChunkKey]:
        """Give up keys, by default all. Returns those that other stores left out because of it."""
        with self._lock:
            given = holder.keys if keys is None else holder.keys & set(keys)
            holder.keys = holder.keys - given
            for key in given:
                if self._holders.get(key) is holder:
                    del self._holders[key]
            return holder.wanted & given
