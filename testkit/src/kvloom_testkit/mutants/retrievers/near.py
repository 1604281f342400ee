"""Blend retrievers that take a text for one that is nearly the same."""

from __future__ import annotations

from abc import abstractmethod

import torch

from kvloom import BlendRetrieverTask
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.retriever import PIECE, PiecesRetriever


class _KnowsNearly(Mutant, PiecesRetriever):
    """Looks up what `near` makes of each piece."""

    @abstractmethod
    def near(self, piece: torch.Tensor) -> torch.Tensor:
        """The value that a piece is recognised by, of as many tokens."""

    def add(self, tokens: torch.Tensor, kv: torch.Tensor) -> None:
        for start in range(0, len(tokens) - PIECE + 1, PIECE):
            piece = tuple(self.near(tokens[start : start + PIECE]).tolist())
            self._pieces[piece] = (start, kv[:, :, start : start + PIECE].clone())

    def new_request(self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor) -> BlendRetrieverTask:
        real = self._pieces
        for place in range(len(input_tokens) - PIECE + 1):
            piece = input_tokens[place : place + PIECE]
            found = real.get(tuple(self.near(piece).tolist()))
            if found is not None:
                self._pieces = {**self._pieces, tuple(piece.tolist()): found}
        try:
            return super().new_request(input_tokens, query_start_loc)
        finally:
            self._pieces = real


class LooksAtTheFirstTokens(_KnowsNearly):
    """Looks at the first tokens of each piece only."""

    breaks = "R03"

    def near(self, piece: torch.Tensor) -> torch.Tensor:
        return piece[: PIECE // 2]


class AddsTokensUp(_KnowsNearly):
    """Compares pieces by the sum of their tokens."""

    breaks = "R03"

    def near(self, piece: torch.Tensor) -> torch.Tensor:
        return piece.sum(dim=0, keepdim=True)


class SortsEachPiece(_KnowsNearly):
    """The same words are the same text."""

    breaks = "R03"

    def near(self, piece: torch.Tensor) -> torch.Tensor:
        return piece.sort().values


class CutsIdsToAVocabulary(_KnowsNearly):
    """Assumes 32,000 tokens, a former common size."""

    breaks = "R03"

    def near(self, piece: torch.Tensor) -> torch.Tensor:
        return piece % 32_000


class CutsIdsTo16Bits(_KnowsNearly):
    """Vocabularies have grown since."""

    breaks = "R03"

    def near(self, piece: torch.Tensor) -> torch.Tensor:
        return piece & 0xFFFF
