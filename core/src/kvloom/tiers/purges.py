"""What is being removed, or was lately, so that nothing that was under way at the time brings it back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvloom.runtime import Runtime
from kvloom.types import ChunkKey

_KEPT = 256

Match = Callable[[ChunkKey], bool]


class Purges:
    """The removals of one stack, in order. Only the verbs of operators add to it.

    Whatever brings a chunk into a tier takes a `mark` when it begins to read it, wherever from, and asks whether the
    chunk was `hit` before it keeps it: memory under its lock, a stored tier after it has written it.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._changing = runtime.lock()
        self._under_way: tuple[Match, ...] = ()
        self._matches: deque[tuple[int, Match]] = deque(maxlen=_KEPT)
        self._count = 0

    def mark(self) -> int:
        """Now: pass it to `hit` later."""
        return self._count

    @contextmanager
    def removing(self, match: Match) -> Iterator[None]:
        """Within the block, every key that matches is being removed from all tiers."""
        with self._changing:
            self._under_way = (*self._under_way, match)
        try:
            yield
        finally:
            # Counted at its end, before it is over: what began while some tier still had the chunk is hit as well.
            with self._changing:
                self._matches.append((self._count + 1, match))
                self._count += 1
                self._under_way = tuple(other for other in self._under_way if other is not match)

    def hit(self, key: ChunkKey, since: int) -> bool:
        """Whether `key` was removed after `since`, or is being; if that is too long ago to tell, yes."""
        if self._under_way and any(match(key) for match in self._under_way):
            return True
        if since == self._count:
            return False
        if self._count - since > _KEPT:
            return True
        return any(match(key) for number, match in tuple(self._matches) if number > since)
