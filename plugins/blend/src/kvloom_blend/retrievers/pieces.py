"""Retrievers that cut whatever was computed into short pieces, each kept once, whatever it was computed behind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence

import torch

from kvloom import Segment

from .passages import Passage, PassageRetriever

_MOST_ROUNDS = 8
"""Questions about one prompt at most. In a text that repeats itself a known piece may begin at every token."""


class PieceRetriever(PassageRetriever):
    """A piece has the KV of the context that it was first computed in, and keeps its neighbours' when they are found
    beside each other."""

    def segments(
        self, tokens: torch.Tensor, passage: Passage, *, context: str = "", salt: str | None = None
    ) -> list[Segment]:
        # Known by its tokens alone, whatever it was computed behind: `lead` and context are not part of the key.
        own = self.engine.passage(tokens[passage.start : passage.end], context=f"{self.type} pieces", salt=salt)
        return [Segment(passage.start + one.start, passage.start + one.end, one.key) for one in own]

    def alone(self, tokens: torch.Tensor, *, salt: str | None = None) -> list[Segment]:
        return [one for at in self.passages(tokens, None) for one in self.segments(tokens, at, salt=salt)]

    def in_context(
        self, tokens: torch.Tensor, boundaries: Sequence[int] | None = None, *, salt: str | None = None
    ) -> list[Segment]:
        return self.alone(tokens, salt=salt)

    @abstractmethod
    def candidates(self, tokens: torch.Tensor, reached: int, salt: str | None) -> list[Passage]:
        """Possible places of pieces, from `reached` on. They may overlap, because a known piece may be gone."""

    def _found(
        self, tokens: torch.Tensor, reached: int, boundaries: Sequence[int] | None, salt: str | None
    ) -> list[Segment]:
        """Asks about pieces that lie beside each other; only where one is gone, about those that overlap it."""
        candidates = self.candidates(tokens, reached, salt)
        found: dict[Passage, list[Segment]] = {}
        gone: set[Passage] = set()
        for _ in range(_MOST_ROUNDS):
            asked = [at for at in _beside_each_other(candidates, reached, gone) if at not in found]
            if not asked:
                break
            wanted = [self.segments(tokens, at, salt=salt) for at in asked]
            there = iter(self.engine.find([one for piece in wanted for one in piece]).tolist())
            for at, piece in zip(asked, wanted, strict=True):
                came = [next(there) for _ in piece]
                if all(came):
                    found[at] = piece
                else:
                    gone.add(at)
        return [one for at in _beside_each_other(sorted(found), reached) for one in found[at]]


def _beside_each_other(passages: Iterable[Passage], reached: int, without: Collection[Passage] = ()) -> list[Passage]:
    """From left to right, each that begins where the one before it ends, or behind that. passages: by their starts."""
    chosen = []
    for at in passages:
        if at.start >= reached and at not in without:
            chosen.append(at)
            reached = at.end
    return chosen
