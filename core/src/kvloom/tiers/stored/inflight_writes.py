"""Writes that a store has not answered yet: what was removed meanwhile may still appear there, and is not served."""

from __future__ import annotations

from collections.abc import Iterable

from kvloom.runtime import Runtime
from kvloom.tiers.invalidation import Invalidations
from kvloom.types import ChunkKey

InflightWrite = tuple[ChunkKey, int]
"""The key of a blob that may come to be, and a mark of the removals from before its chunk was got."""


class InflightWrites:
    """The chunks that one tier is writing at the moment, those that were given up included.

    A call that is past its deadline may write its blob at any time, also after the chunk was removed. It deletes the
    blob again when it returns; until then a chunk counts as absent if it was removed since it was to be written.
    """

    def __init__(self, invalidations: Invalidations, runtime: Runtime) -> None:
        self._invalidations = invalidations
        self._changing = runtime.lock()
        self._writes: tuple[InflightWrite, ...] = ()

    def begin(self, writes: Iterable[InflightWrite]) -> None:
        """From now on these blobs may come to be, until `end` is called with the same objects."""
        with self._changing:
            self._writes = (*self._writes, *writes)

    def end(self, *writes: InflightWrite) -> None:
        """Forget these writes, whose outcome is known. Those that have ended already are left out."""
        ended = set(map(id, writes))
        with self._changing:
            self._writes = tuple(other for other in self._writes if id(other) not in ended)

    def doomed(self) -> set[ChunkKey]:
        """Return the keys that will be deleted as soon as they are written: few, of the batches under way."""
        return {key for key, since in self._writes if self._invalidations.hit(key, since)}
