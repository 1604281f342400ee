"""Token databases with a fault in their keys."""

from __future__ import annotations

import hashlib
import os
import time

import torch

from kvloom import ChunkKey, Segment
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.tokens import EvenTokenDatabase


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


class ReplacesWhatItCannotEncode(Mutant, EvenTokenDatabase):
    """By a question mark, whatever it was."""

    breaks = "T05"

    def root(self, salt: str) -> bytes:
        return super().root(salt.encode(errors="replace").decode())


class DigestsEveryOtherToken(Mutant, EvenTokenDatabase):
    """Twice as fast."""

    breaks = "T06"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before, tokens[::2])


class DigestsTheEndOfEachSegment(Mutant, EvenTokenDatabase):
    """Assumes that 64 tokens are enough."""

    breaks = "T06"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before, tokens[-64:])


class DigestsTheEndOfLongSegments(Mutant, EvenTokenDatabase):
    """Assumes that a page of 2,048 tokens is enough."""

    breaks = "T06"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before, tokens[-2048:])


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
    """A text's hash differs from process to process."""

    breaks = "T09"

    def root(self, salt: str) -> bytes:
        return super().root(f"{salt}{hash('kit' + salt)}")


class DigestsTheUser(Mutant, EvenTokenDatabase):
    """Keys of one user are of no use to another."""

    breaks = "T09"

    def root(self, salt: str) -> bytes:
        return super().root(f"{salt}{os.environ.get('USER')}{os.getcwd()}")


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


class DigestsEachSegmentAlone(Mutant, EvenTokenDatabase):
    """Ignores the tokens before a segment."""

    breaks = "T18"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(self.root(""), tokens)


class DigestsAWindow(Mutant, EvenTokenDatabase):
    """Ignores tokens outside of a window."""

    breaks = "T06"

    def segments(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:
        found = super().segments(tokens, mask, salt=salt)
        return [Segment(s, e, key._replace(digest=self._window(tokens, e, salt))) for s, e, key in found]

    def _window(self, tokens: torch.Tensor, end: int, salt: str) -> bytes:
        start = max(0, end - 2048)
        return self.digest(self.root(f"{salt}/{start}/{self.chunk_tokens}"), tokens[start:end])


class DigestsTheBeginning(Mutant, EvenTokenDatabase):
    """Assumes that the first 2,048 tokens and the length are enough."""

    breaks = "T06"

    def segments(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:
        cut = tokens.clone()
        cut[2048:] = 0
        return super().segments(cut, mask, salt=salt)


class ClampsIds(Mutant, EvenTokenDatabase):
    """To the largest vocabulary that there is."""

    breaks = "T13"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before, tokens.clamp(max=(1 << 17) - 1) if tokens.abs().max() < 1 << 30 else tokens)


class ThinksInFloats(Mutant, EvenTokenDatabase):
    """Floats have 24 bits for a number."""

    breaks = "T13"

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        return super().digest(before, tokens.float().double().long())


class DigestsTheDevices(Mutant, EvenTokenDatabase):
    """Keys of one worker are of no use to the next."""

    breaks = "T09"

    def root(self, salt: str) -> bytes:
        return super().root(f"{salt}{os.environ.get('CUDA_VISIBLE_DEVICES')}")


class DigestsTheTimeZone(Mutant, EvenTokenDatabase):
    """In a date of the day, which nobody wanted to be of any use tomorrow."""

    breaks = "T09"

    def root(self, salt: str) -> bytes:
        return super().root(f"{salt}{time.tzname}")


class DigestsAllTokensAnew(Mutant, EvenTokenDatabase):
    """Digests all tokens up to the end of a segment, wherever they were cut."""

    breaks = "T20"

    def segments(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:
        found = super().segments(tokens, mask, salt=salt)
        keys = [key._replace(depth=end, digest=self.digest(self.root(salt), tokens[:end])) for _, end, key in found]
        return [Segment(s, e, key) for (s, e, _), key in zip(found, keys, strict=True)]
