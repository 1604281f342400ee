"""Token databases whose digests have too few bits."""

from __future__ import annotations

import torch

from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.tokens import EvenTokenDatabase


class HasShortDigests(Mutant, EvenTokenDatabase):
    """Sixteen bytes ought to be enough."""

    breaks = "T12"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before, tokens)[:16]


class RepeatsAFewBytes(Mutant, EvenTokenDatabase):
    """Eight times the first four, to make up 32."""

    breaks = "T12"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before, tokens)[:4] * 8


class FillsUpItsDigests(Mutant, EvenTokenDatabase):
    """With zeros."""

    breaks = "T12"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before, tokens)[:8].ljust(32, b"\0")
