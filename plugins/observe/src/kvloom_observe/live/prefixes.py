"""The prefixes that saved the most tokens: a bounded number of counts, of which the smallest are replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvloom import ChunkKey

MOST = 1024
"""Maximum number of counted prefixes; a new one replaces the one with the fewest saved tokens."""


@dataclass(slots=True)
class Prefix:
    """Some leading chunks that several prompts share."""

    digest: str
    """The short digest of its last chunk's key: identifies it, and reveals nothing about its content."""
    tokens: int
    hits: int = 0
    above: str = ""
    """The digest of the next shorter one that is counted."""

    @property
    def saved_tokens(self) -> int:
        return self.hits * self.tokens


class Prefixes:
    """Counts each hit at chunks 1, 2, 4, 8 and so on of its chain, and at the last one that was served."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._counts: dict[str, Prefix] = {}

    def hit(self, keys: Sequence[ChunkKey], ends: Sequence[int], served: int) -> None:
        """served: how many chunks from the beginning of the chain on were given."""
        depths = [depth for depth in (1 << step for step in range(served.bit_length())) if depth < served]
        above = ""
        for depth in [*depths, served]:
            digest = keys[depth - 1].digest.hex()[:12]
            counted = self._counts.get(digest)
            if counted is None:
                if len(self._counts) >= self._most:
                    del self._counts[min(self._counts, key=lambda one: self._counts[one].saved_tokens)]
                counted = self._counts[digest] = Prefix(digest, ends[depth - 1], 0, above)
            counted.hits += 1
            above = digest

    def hottest(self, count: int) -> list[Prefix]:
        """By tokens saved; of a chain that is always used to its end, its end only."""
        within: dict[str, int] = {}
        for one in self._counts.values():
            if one.above:
                within[one.above] = max(within.get(one.above, 0), one.hits)
        telling = [one for one in self._counts.values() if within.get(one.digest, 0) < one.hits]
        return sorted(telling, key=lambda one: one.saved_tokens, reverse=True)[:count]
