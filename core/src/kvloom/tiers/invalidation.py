"""What is being removed, or was lately, so that nothing that was under way at the time brings it back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

from kvloom.runtime import Runtime
from kvloom.types import ChunkKey

_MOST_KEYS = 16384
"""So many keys are remembered one by one; then it is the namespace of the oldest that counts as removed."""
_MOST_PREFIXES = 4096
"""So many namespaces; then it is everything."""

Match = Callable[[ChunkKey], bool]


class Invalidations:
    """The removals of one stack, numbered in order. Only the verbs of operators add to it.

    Whatever brings a chunk into a tier takes a `mark` when it begins to read it, wherever from, and asks whether the
    chunk was `hit` before it keeps it: memory under its lock, a stored tier after it has written it.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._changing = runtime.lock()
        self._under_way: tuple[Match, ...] = ()
        self._count = 0
        # The number of the last removal of each. Read without the lock: what is to be found in one or another is never
        # for a moment in neither.
        self._keys: OrderedDict[ChunkKey, int] = OrderedDict()
        self._prefixes: OrderedDict[str, int] = OrderedDict()
        self._everything = 0

    def mark(self) -> int:
        """Now: pass it to `hit` later."""
        return self._count

    def removing(self, keys: Collection[ChunkKey]) -> AbstractContextManager[None]:
        """Within the block, these keys are being removed from all tiers."""
        doomed = frozenset(keys)
        return self._removing(doomed.__contains__, lambda number: self._note_keys(doomed, number))

    def clearing(self, prefix: str) -> AbstractContextManager[None]:
        """Within the block, all keys with this prefix are. prefix: `<fingerprint>/` or `<fingerprint>/<salt tag>/`."""
        assert prefix.endswith("/") and prefix.count("/") <= 2, prefix
        return self._removing(lambda key: prefix in _prefixes_of(key), lambda number: self._note_prefix(prefix, number))

    @contextmanager
    def _removing(self, match: Match, note: Callable[[int], None]) -> Iterator[None]:
        with self._changing:
            self._under_way = (*self._under_way, match)
        try:
            yield
        finally:
            # Counted at its end, before it is over: what began while some tier still had the chunk is hit as well.
            with self._changing:
                note(self._count + 1)
                self._count += 1
                self._under_way = tuple(other for other in self._under_way if other is not match)

    def hit(self, key: ChunkKey, since: int) -> bool:
        """Whether `key` was removed after `since`, or is being; yes also if that is too long ago to tell."""
        if self._under_way and any(match(key) for match in self._under_way):
            return True
        if since == self._count:
            return False
        return (
            self._keys.get(key, 0) > since
            or any(self._prefixes.get(prefix, 0) > since for prefix in _prefixes_of(key))
            or self._everything > since
        )

    def _note_keys(self, keys: Collection[ChunkKey], number: int) -> None:
        for key in keys:
            self._keys[key] = number
            self._keys.move_to_end(key)
        while len(self._keys) > _MOST_KEYS:
            key, removed = next(iter(self._keys.items()))
            self._note_prefix(f"{key.namespace}/", removed)
            del self._keys[key]

    def _note_prefix(self, prefix: str, number: int) -> None:
        self._prefixes[prefix] = max(number, self._prefixes.get(prefix, 0))
        self._prefixes.move_to_end(prefix)
        while len(self._prefixes) > _MOST_PREFIXES:
            oldest, removed = next(iter(self._prefixes.items()))
            self._everything = max(removed, self._everything)
            del self._prefixes[oldest]


def _prefixes_of(key: ChunkKey) -> tuple[str, str]:
    fingerprint = key.namespace.partition("/")[0]
    return f"{fingerprint}/", f"{key.namespace}/"
