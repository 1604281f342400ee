"""Removals under way and recent ones: a read or write that began before a removal does not bring the chunk back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from kvloom.runtime import Runtime
from kvloom.tiers.change_log import ChangeLog
from kvloom.types import ChunkKey

_MOST = 1 << 16
"""Number of removed keys and namespaces that are remembered: a prompt of a million tokens in the smallest chunks."""

Match = Callable[[ChunkKey], bool]


class Invalidations:
    """The removals of one stack, numbered in order. Only `remove` and `clear` add to it.

    To bring a chunk into a tier, take a `mark` before reading the chunk, and ask whether it was `hit` before the tier
    keeps it: memory asks under its lock, a stored tier after the write.
    """

    def __init__(self, runtime: Runtime, *, most: int = _MOST) -> None:
        """most: number of removals that are remembered. An older one counts as a removal of everything."""
        self._changing = runtime.lock()
        self._under_way: tuple[Match, ...] = ()
        self._log = ChangeLog(most)
        self.mark = self._log.mark
        """Now: pass it to `hit` later."""

    def removing(self, keys: Collection[ChunkKey]) -> AbstractContextManager[None]:
        """Within the block, these keys are being removed from all tiers."""
        doomed = frozenset(keys)
        return self._removing(doomed.__contains__, doomed)

    def clearing(self, prefix: str) -> AbstractContextManager[None]:
        """Within the block, all keys with this prefix are. prefix: `<fingerprint>/` or `<fingerprint>/<salt tag>/`."""
        assert prefix.endswith("/") and prefix.count("/") <= 2, prefix
        return self._removing(lambda key: prefix in _prefixes_of(key), [prefix])

    @contextmanager
    def _removing(self, match: Match, subjects: Collection[Hashable]) -> Iterator[None]:
        with self._changing:
            self._under_way = (*self._under_way, match)
        try:
            yield
        finally:
            # At the end, while still under way: a read that began while a tier still had the chunk is hit as well.
            with self._changing:
                self._log.note(*subjects)
                self._under_way = tuple(other for other in self._under_way if other is not match)

    def hit(self, key: ChunkKey, since: int) -> bool:
        """Return whether `key` was removed after `since`, or is being removed. True if that is too long ago to tell."""
        if self._under_way and any(match(key) for match in self._under_way):
            return True
        return since != self.mark() and self._log.after(since, key, *_prefixes_of(key))


def _prefixes_of(key: ChunkKey) -> tuple[str, str]:
    fingerprint = key.namespace.partition("/")[0]
    return f"{fingerprint}/", f"{key.namespace}/"


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
