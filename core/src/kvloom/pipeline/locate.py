"""Finds chunks: each stored tier is asked only for what no faster one has, while that is being read already."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvloom.tiers.request_context import HURRIED_SHARE, RequestContext
from kvloom.tiers.stored.existence import Question
from kvloom.tiers.stored.tier import StoredTier
from kvloom.types import ChunkKey


class Search:
    """Finds the fastest stored tier of each of some chunks. For one thread.

    One tier is asked at a time. Its silence holds up only the chunks that no faster tier has.
    """

    def __init__(self, stored: Sequence[StoredTier], keys: Sequence[ChunkKey], context: RequestContext) -> None:
        """stored: fastest first."""
        self._stored = stored
        self._context = context
        self._left = list(dict.fromkeys(keys))
        self._unknown = set(self._left)
        self._first: dict[ChunkKey, int] = {}
        """By key, the number of the fastest tier that says it holds it."""
        self._asked = 0
        self._question: Question | None = None

    def knows(self, key: ChunkKey) -> bool:
        """Return whether `tiers` of this key needs no waiting."""
        if key in self._unknown:
            self._go_on(wait=False)
        return key not in self._unknown

    def wait(self) -> None:
        """Wait until a tier has answered, or has not in time. Does nothing if all is known."""
        self._go_on(wait=True)

    def tiers(self, key: ChunkKey, *, hurried: bool = False) -> list[StoredTier]:
        """The tiers from which to read a chunk, fastest first: the first that says it holds it, and those below.

        All of them for a key that was not searched. Waits for a tier's answer at most as long as the operation does.
        hurried: at most `HURRIED_SHARE` of the deadline; then the tier is given up for these keys.
        """
        while key in self._unknown:
            self._go_on(wait=True, hurried=hurried)
        first = self._first.get(key, 0)
        return [
            tier for number, tier in enumerate(self._stored[first:]) if (key in self._first and not number)
            or tier.may_hold(key)
        ]  # fmt: skip

    def close(self) -> None:
        """Cancel the open question."""
        if self._question is not None:
            self._question.cancel()
            self._question = None

    def _go_on(self, *, wait: bool, hurried: bool = False) -> None:
        """Take the answers that have arrived and ask the next tiers. wait: wait for one answer first."""
        while self._left and self._asked < len(self._stored):
            if self._question is None:
                self._question = self._stored[self._asked].seek(self._left, self._context)
            if not (wait or self._question.done):
                return
            wait = False
            seconds = HURRIED_SHARE * self._stored[self._asked].deadline if hurried else math.inf
            found, self._question = self._question.answer(seconds), None
            for key, here in zip(self._left, found, strict=True):
                if here:
                    self._first[key] = self._asked
                    self._unknown.discard(key)
            self._left = [key for key, here in zip(self._left, found, strict=True) if not here]
            self._asked += 1
        if self._asked == len(self._stored):
            self._first.update((key, self._asked) for key in self._left)
            self._unknown.clear()
            self._left = []
