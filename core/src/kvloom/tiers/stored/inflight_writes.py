"""Writes that a store has not answered yet: what was removed meanwhile may still appear there, and is not served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvloom.runtime import Runtime
from kvloom.tiers.invalidation import Invalidations
from kvloom.types import ChunkKey


class InflightWrites:
    """The calls of one tier that are writing at the moment, those that were given up included.

    A call that is past its deadline may write its blob at any time, also after the chunk was removed. It deletes the
    blob again when it returns; until then a chunk counts as absent if it was removed since it was to be written.
    """

    def __init__(self, invalidations: Invalidations, runtime: Runtime) -> None:
        self._invalidations = invalidations
        self._changing = runtime.lock()
        self._since: tuple[tuple[ChunkKey, int], ...] = ()

    @contextmanager
    def of(self, key: ChunkKey, since: int) -> Iterator[None]:
        """Within the block, a blob of `key` may come to be. since: a mark from before its chunk was got."""
        mine = (key, since)
        with self._changing:
            self._since = (*self._since, mine)
        try:
            yield
        finally:
            with self._changing:
                self._since = tuple(other for other in self._since if other is not mine)

    def doomed(self) -> set[ChunkKey]:
        """Return the keys that will be deleted as soon as they are written: at most one for each thread of the tier."""
        return {key for key, since in self._since if self._invalidations.hit(key, since)}
