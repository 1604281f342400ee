"""Support for the tests of the radix token database: instances, branching sequences, and a model of the tree."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import torch

from kvloom import Segment
from kvloom_tokens_radix.cutting import Rules
from kvloom_tokens_radix.database import RadixTokenDatabase

FINGERPRINT = "0123456789abcdef0123456789abcdef"


def radix(*, chunk_tokens: int = 256, fingerprint: str = FINGERPRINT, **settings: Any) -> RadixTokenDatabase:
    database = RadixTokenDatabase(RadixTokenDatabase.Config(**settings))
    database.fingerprint, database.chunk_tokens = fingerprint, chunk_tokens
    return database


def tokens_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor(random.Random(seed).choices(range(120_000), k=count), dtype=torch.int64)


def spans(segments: list[Segment]) -> list[tuple[int, int]]:
    return [(segment.start, segment.end) for segment in segments]


def ends(segments: list[Segment]) -> list[int]:
    return [segment.end for segment in segments]


def packed(tokens: tuple[int, ...]) -> bytes:
    return array("i", tokens).tobytes()


def prompts(count: int, *, length: int = 400, seed: int = 0) -> list[torch.Tensor]:
    """Sequences that branch off each other."""
    chance = random.Random(seed)
    found = [tokens_of(length, seed)]
    while len(found) < count:
        base = chance.choice(found)
        kept = base[: chance.randrange(20, len(base))]
        found.append(torch.cat([kept, tokens_of(chance.randrange(20, length), len(found) + 1000 * seed)]))
    return found


def cuts(path: Path, asked: list[torch.Tensor], **settings: object) -> list[list[int]]:
    database = radix(path=path, **settings)
    try:
        return [ends(database.segments(each)) for each in asked]
    finally:
        database.close()


def learnt(path: Path, asked: list[torch.Tensor]) -> list[list[int]]:
    database = radix(path=path)
    for each in asked:
        database.learn(each)
    found = [ends(database.segments(each)) for each in asked]
    database.close()
    return found


def journals(path: Path) -> list[Path]:
    return sorted(path.glob("*.journal"))


class Model:
    """The tree without a tree: every known end as the tokens before it."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.known: list[tuple[int, ...]] = []
        self.starts: dict[tuple[int, ...], int] = {}

    def cut(self, tokens: tuple[int, ...]) -> list[int]:
        shared = max((self._common(tokens, each) for each in self.known), default=0)
        reach = max((end for end in range(1, shared + 1) if tokens[:end] in self.starts), default=0)
        chain, at = [], reach
        while at:
            chain.append(at)
            at = self.starts[tokens[:at]]
        chain.reverse()
        step, least, align = self.rules
        at = reach
        for end in range(reach + 1, len(tokens) + 1):
            room = (end // step + 1) * step - end
            fits = end % align == 0 and end - at >= least and room >= least
            if end % step == 0 or (fits and self._wanted(end, shared, tokens)):
                chain.append(end)
                at = end
        return chain

    def _wanted(self, end: int, shared: int, tokens: tuple[int, ...]) -> bool:
        """Return whether it is the last place before a branch, or before the end, where a segment can end."""
        step, least, align = self.rules
        return any(
            end <= stop and end == min(stop, (stop // step + 1) * step - least) // align * align
            for stop in (shared, len(tokens))
        )

    def learn(self, tokens: tuple[int, ...]) -> None:
        chain = self.cut(tokens)
        for start, end in zip([0, *chain], chain, strict=False):
            self.starts.setdefault(tokens[:end], start)
        if chain:
            self.known.append(tokens[: chain[-1]])

    @staticmethod
    def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
        count = 0
        for a, b in zip(one, other, strict=False):
            if a != b:
                break
            count += 1
        return count
