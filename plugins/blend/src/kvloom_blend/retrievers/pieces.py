"""Retrievers that cut whatever was computed into short pieces, each kept once, whatever it was computed behind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from kvloom import Segment

from .passages import Passage, PassageRetriever


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
        wanted = [self.segments(tokens, at, salt=salt) for at in self.candidates(tokens, reached, salt)]
        there = iter(self.engine.find([one for piece in wanted for one in piece]).tolist() if wanted else [])
        found: list[Segment] = []
        for piece in wanted:
            came = [next(there) for _ in piece]
            if piece[0].start >= reached and all(came):
                found += piece
                reached = piece[-1].end
        return found
