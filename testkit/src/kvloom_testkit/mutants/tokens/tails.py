"""Token databases with a fault in what they keep of a sequence's tail."""

from __future__ import annotations

import copy

import torch

from kvloom import Segment
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.tokens import EvenTokenDatabase


class HalvesTokenDatabase(EvenTokenDatabase):
    """Keeps the first half of the last chunk."""

    def cuts(self, tokens: torch.Tensor, salt: str) -> list[tuple[int, int]]:
        whole = super().cuts(tokens, salt)
        end, half = len(whole) * self.chunk_tokens, self.chunk_tokens // 2
        return [*whole, (end, end + half)] if self.save_tails and tokens.numel() >= end + half else whole

    def pieces(self, tokens: torch.Tensor, start: int, *, salt: str = "") -> list[Segment]:
        if not self.save_tails or start + self.chunk_tokens > tokens.numel():
            return []
        return self.segments(tokens[: start + self.chunk_tokens // 2], salt=salt)[-1:]

    def possible(self, tokens: torch.Tensor, *, salt: str = "") -> list[Segment]:
        other = copy.copy(self)
        other.save_tails = True
        return [one for length in range(len(tokens) + 1) for one in other.segments(tokens[:length], salt=salt)]


class LeavesPiecesOfShorterOnes(Mutant, HalvesTokenDatabase):
    """Names those of the tokens themselves."""

    breaks = "T25"

    def possible(self, tokens: torch.Tensor, *, salt: str = "") -> list[Segment]:
        return self.segments(tokens, salt=salt)


class NamesPiecesOfEveryTenant(Mutant, HalvesTokenDatabase):
    """Looks for pieces without the salt."""

    breaks = "T22"

    def pieces(self, tokens: torch.Tensor, start: int, *, salt: str = "") -> list[Segment]:
        return super().pieces(tokens, start)


class NamesPiecesOfEveryChunk(Mutant, HalvesTokenDatabase):
    """Names those behind the chunk that is lacking, too."""

    breaks = "T22"

    def pieces(self, tokens: torch.Tensor, start: int, *, salt: str = "") -> list[Segment]:
        starts = range(start, tokens.numel(), self.chunk_tokens)
        return [piece for at in starts for piece in super(type(self), self).pieces(tokens, at, salt=salt)]


class FindsTailsOfOneLength(Mutant, HalvesTokenDatabase):
    """Names nothing of a shorter sequence."""

    breaks = "T23"

    def pieces(self, tokens: torch.Tensor, start: int, *, salt: str = "") -> list[Segment]:
        return []


class KeysSayWhetherTailsAreKept(Mutant, HalvesTokenDatabase):
    """The setting is part of every key."""

    breaks = "T24"

    def root(self, salt: str) -> bytes:
        return super().root(f"{salt} {self.save_tails}")
