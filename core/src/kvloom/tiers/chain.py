"""The chain of chunks that an operation is about. None of them is evicted to make room for a later one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from kvloom.types import ChunkKey

_depth = attrgetter("depth")


class Chain:
    """Chunks in order, each usable only with all before it. Its tables are made when first asked for."""

    __slots__ = ("_depths", "_ends", "_keys", "_settled")

    def __init__(self, keys: Sequence[ChunkKey] = ()) -> None:
        self._keys = keys
        # Filled when first asked for, and shared by all that are about the same chunks.
        self._depths: dict[bytes, int] = {}
        self._ends: dict[int, int] = {}
        self._settled: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def again(self) -> Chain:
        """The same chunks, for another operation."""
        if not self:
            return self
        chain = Chain(self._keys)
        chain._depths = self._depths
        return chain

    def previous(self, key: ChunkKey) -> ChunkKey | None:
        """The chunk right before `key`, where the chunks are in order."""
        place = key.depth - self._keys[0].depth - 1 if self._keys else -1
        found = self._keys[place] if 0 <= place < len(self._keys) else None
        if found is not None and (found.namespace, found.depth) == (key.namespace, key.depth - 1):
            return found
        place = bisect_left(self._keys, key.depth, key=_depth)  # depths grow, and need not count chunks
        there = 0 < place < len(self._keys) and self._keys[place] == key
        return self._keys[place - 1] if there else None

    def has(self, digest: bytes) -> bool:
        return digest in self._by_digest()

    def leads_to(self, key: ChunkKey, digest: bytes) -> bool:
        """Return whether the chunk of `digest` comes before `key`."""
        return self._by_digest().get(digest, key.depth) < key.depth

    def _by_digest(self) -> dict[bytes, int]:
        if not self._depths:
            self._depths.update({each.digest: each.depth for each in self._keys})
        return self._depths

    def end_at(self, key: ChunkKey, place: object) -> None:
        """Note that `place` has no room for `key`, so that nothing behind it is of use there."""
        self._ends[id(place)] = min(key.depth, self._ends.get(id(place), key.depth))

    def ends_before(self, key: ChunkKey, place: object) -> bool:
        """Return whether `place` had no room for a chunk before `key`."""
        return bool(self._ends) and self._ends.get(id(place), key.depth) < key.depth

    def expected_before(self, key: ChunkKey, place: object, expected: Callable[[ChunkKey], bool]) -> int:
        """Count the chunks before `key` that are expected in `place`. Leading others are skipped from now on."""
        stop = bisect_left(self._keys, key.depth, key=_depth)
        start = self._settled.get(id(place), 0)
        while start < stop and not expected(self._keys[start]):
            start += 1
        self._settled[id(place)] = start
        return sum(each.depth < key.depth and expected(each) for each in self._keys[start:stop])

    def backwards(self) -> Iterator[ChunkKey]:
        return reversed(self._keys)

    def before(self, key: ChunkKey) -> Iterator[ChunkKey]:
        return (each for each in self._keys if each.depth < key.depth)


NO_CHAIN = Chain()
