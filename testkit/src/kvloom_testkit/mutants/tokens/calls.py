"""Token databases with a fault each, and odd ones."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from kvloom import Segment
from kvloom_testkit.mutants import Mutant, Oddity
from kvloom_testkit.reference.tokens import EvenTokenDatabase


class LeavesOutTheFirstToken(Mutant, EvenTokenDatabase):
    """Treats the first token of every prompt as irrelevant."""

    breaks = "T01"

    def cuts(self, tokens: torch.Tensor, salt: str) -> list[tuple[int, int]]:
        return [(start + 1, end + 1) for start, end in super().cuts(tokens[1:], salt)]


class FillsTheLastSegment(Mutant, EvenTokenDatabase):
    """Rounds up: the last segment ends after the last token."""

    breaks = "T01"

    def cuts(self, tokens: torch.Tensor, salt: str) -> list[tuple[int, int]]:
        starts = range(0, tokens.numel(), self.chunk_tokens)
        return [(start, start + self.chunk_tokens) for start in starts]


class BeginsAnewAtTheMask(Mutant, EvenTokenDatabase):
    """Cuts the tokens off before it makes keys."""

    breaks = "T02"

    def segments(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:
        whole = super().segments(tokens, mask, salt=salt)
        if mask is None or not whole:
            return whole
        first = whole[0].start
        return [Segment(s + first, e + first, key) for s, e, key in super().segments(tokens[first:], salt=salt)]


class IgnoresTheMask(Mutant, EvenTokenDatabase):
    """Returns all segments."""

    breaks = "T02"

    def segments(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:
        super().segments(tokens, mask, salt=salt)
        return super().segments(tokens, salt=salt)


class TakesTheMaskByPosition(Mutant, EvenTokenDatabase):
    """Calls it something else, as nobody who passes it by name expects."""

    breaks = "T02"

    def segments(self, tokens: torch.Tensor, wanted: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:  # type: ignore[override]
        return super().segments(tokens, wanted, salt=salt)


class RoundsTheMask(Mutant, EvenTokenDatabase):
    """Counts the Falses and leaves out what they cover entirely."""

    breaks = "T03"

    def segments(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:
        skipped = 0 if mask is None else int((~mask).sum())
        return [each for each in super().segments(tokens, salt=salt) if each.end > skipped]


class AcceptsALongerMask(Mutant, EvenTokenDatabase):
    """Cuts the mask to the tokens."""

    breaks = "T03"

    def segments(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:
        return super().segments(tokens, None if mask is None else mask[: tokens.numel()], salt=salt)


class KeepsTheListItReturns(Mutant, EvenTokenDatabase):
    """A cache of results, which belong to the callers too."""

    breaks = "T10"

    def segments(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:
        results: dict[Any, list[Segment]] = self.__dict__.setdefault("_results", {})
        about = (tuple(tokens.tolist()), None if mask is None else tuple(mask.tolist()), salt, self.fingerprint)
        if about not in results:
            results[about] = super().segments(tokens, mask, salt=salt)
        return results[about]


class ShiftsTheTokensInPlace(Mutant, EvenTokenDatabase):
    """Makes room for a special token in the caller's tensor."""

    breaks = "T10"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before, tokens.add_(1))


class KeepsTheDigestOnTheInstance(Mutant, EvenTokenDatabase):
    """Threads go on with each other's."""

    breaks = "T11"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        self._before = before
        time.sleep(0.001)
        return super().digest(self._before, tokens)


class FailsForNothing(Mutant, EvenTokenDatabase):
    """Looks at the first token."""

    breaks = "T16"

    def cuts(self, tokens: torch.Tensor, salt: str) -> list[tuple[int, int]]:
        assert int(tokens[0]) is not None
        return super().cuts(tokens, salt)


class ClosesOnce(Mutant, EvenTokenDatabase):
    """Raises at the second `close`."""

    breaks = "T17"

    def close(self) -> None:
        del self.chunk_tokens


class SeedsRandomNumbers(Mutant, EvenTokenDatabase):
    """Seeds the generator of the whole process."""

    breaks = "T21"

    def root(self, salt: str) -> bytes:
        random.seed(0)
        return super().root(salt)


class LearningTokenDatabase(EvenTokenDatabase):
    """Learns sequences, and cuts also where one leaves those that it knows."""

    def learn(self, tokens: torch.Tensor, *, salt: str = "") -> None:
        known = self.__dict__.setdefault("_known", [])
        if (salt, tokens.tolist()) not in known:
            known.append((salt, tokens.tolist()))

    def cuts(self, tokens: torch.Tensor, salt: str) -> list[tuple[int, int]]:
        here, ends = tokens.tolist(), {end for _, end in super().cuts(tokens, salt)}
        for its_salt, known in list(self.__dict__.get("_known", ())):
            shared = next((i for i, (a, b) in enumerate(zip(here, known, strict=False)) if a != b), None)
            if shared and its_salt == salt:
                ends.add(shared)
        return list(zip([0, *sorted(ends)], sorted(ends), strict=False))

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before + b"a segment", tokens)


class CutsAtBranches(Oddity, LearningTokenDatabase):
    """Segments of any length, which change as it learns."""


class CutsAfterRoundIds(Oddity, EvenTokenDatabase):
    """Segments of all lengths, which end where a token says so, and a last one that is short."""

    def cuts(self, tokens: torch.Tensor, salt: str) -> list[tuple[int, int]]:
        ends = [at + 1 for at, each in enumerate(tokens.tolist()) if each % 11 == 0 or at % 40 == 39]
        ends += [tokens.numel()] if tokens.numel() not in (0, *ends) else []
        return list(zip([0, *ends], ends, strict=False))
