"""Token databases with a fault each, and odd ones."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import torch

from kvloom import ChunkKey, Segment
from kvloom_testkit.mutants import Mutant, Oddity
from kvloom_testkit.reference.tokens import EvenTokenDatabase


class LeavesOutTheFirstToken(Mutant, EvenTokenDatabase):
    """As if every prompt began with a token that does not count."""

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


class LeavesTheFingerprintToTheNamespace(Mutant, EvenTokenDatabase):
    """Its digests are the same for all models."""

    breaks = "T04"

    def root(self, salt: str) -> bytes:
        return hashlib.sha256(salt.encode(errors="surrogatepass")).digest()


class ReadsTheFingerprintOnce(Mutant, EvenTokenDatabase):
    """Keeps the first digest of each salt."""

    breaks = "T04"

    def root(self, salt: str) -> bytes:
        roots = self.__dict__.setdefault("_roots", {})
        return roots.setdefault(salt, super().root(salt))  # type: ignore[no-any-return]


class LeavesTheSaltToTheNamespace(Mutant, EvenTokenDatabase):
    """Its digests are the same for all tenants."""

    breaks = "T05"

    def root(self, salt: str) -> bytes:
        return super().root("")


class TidiesSalts(Mutant, EvenTokenDatabase):
    """Two tenants are one if their names differ in spaces or case."""

    breaks = "T05"

    def root(self, salt: str) -> bytes:
        return super().root(salt.strip().casefold())


class DigestsEveryOtherToken(Mutant, EvenTokenDatabase):
    """Twice as fast."""

    breaks = "T06"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before, tokens[::2])


class AddsTokensUp(Mutant, EvenTokenDatabase):
    """A digest of the sum, the first and the last."""

    breaks = "T06"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before, torch.stack([tokens.sum() // 8, tokens[0], tokens[-1]]))


class DigestsTheLength(Mutant, EvenTokenDatabase):
    """Every key covers how long the prompt is."""

    breaks = "T07"

    def segments(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:
        self._count = tokens.numel()
        return super().segments(tokens, mask, salt=salt)

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before + bytes(self._count % 251), tokens)


class DividesEvenly(Mutant, EvenTokenDatabase):
    """Four segments, however long the prompt is."""

    breaks = "T07"

    def cuts(self, tokens: torch.Tensor, salt: str) -> list[tuple[int, int]]:
        step = tokens.numel() // 4
        return [(start, start + step) for start in range(0, 4 * step, step)] if step else []


class DigestsMemoryAsItLies(Mutant, EvenTokenDatabase):
    """The same numbers in another type are other bytes."""

    breaks = "T08"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return hashlib.sha256(before + tokens.numpy().tobytes()).digest()


class ReadsPastTheStride(Mutant, EvenTokenDatabase):
    """Takes the storage for the tensor."""

    breaks = "T08"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before, tokens.as_strided(tokens.shape, (1,)))


class UsesPythonsHash(Mutant, EvenTokenDatabase):
    """Of a text, which differs from process to process."""

    breaks = "T09"

    def root(self, salt: str) -> bytes:
        return super().root(f"{salt}{hash('kit' + salt)}")


class DigestsTheUser(Mutant, EvenTokenDatabase):
    """Keys of one user are of no use to another."""

    breaks = "T09"

    def root(self, salt: str) -> bytes:
        return super().root(f"{salt}{os.environ.get('USER')}{os.getcwd()}")


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


class PutsTheSaltInTheNamespace(Mutant, EvenTokenDatabase):
    """Names tenants in every listing, and breaks on a slash."""

    breaks = "T12"

    def namespace(self, salt: str) -> str:
        return f"{self.fingerprint}/{salt or '-'}"


class HasNoDepth(Mutant, EvenTokenDatabase):
    """Every segment has the same depth."""

    breaks = "T12"

    def segments(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:
        found = super().segments(tokens, mask, salt=salt)
        return [Segment(s, e, ChunkKey(key.namespace, 0, key.digest)) for s, e, key in found]


class HasShortDigests(Mutant, EvenTokenDatabase):
    """Sixteen bytes ought to be enough."""

    breaks = "T12"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before, tokens)[:16]


class JoinsDecimals(Mutant, EvenTokenDatabase):
    """1 and 23 read as 12 and 3."""

    breaks = "T13"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return hashlib.sha256(before + "".join(map(str, tokens.tolist())).encode()).digest()


class CutsIdsTo16Bits(Mutant, EvenTokenDatabase):
    """Vocabularies have grown since."""

    breaks = "T13"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before, tokens & 0xFFFF)


class CutsIdsTo32Bits(Mutant, EvenTokenDatabase):
    """An id that does not fit is another id."""

    breaks = "T13"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before, tokens.int())


class FailsForNothing(Mutant, EvenTokenDatabase):
    """Looks at the first token."""

    breaks = "T16"

    def cuts(self, tokens: torch.Tensor, salt: str) -> list[tuple[int, int]]:
        assert int(tokens[0]) is not None
        return super().cuts(tokens, salt)


class ClosesOnce(Mutant, EvenTokenDatabase):
    """The second time there is nothing to close."""

    breaks = "T17"

    def close(self) -> None:
        del self.chunk_tokens


class DigestsEachSegmentAlone(Mutant, EvenTokenDatabase):
    """What comes before does not count."""

    breaks = "T18"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(self.root(""), tokens)


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
