"""Sequences of tokens, and what a token database makes of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from kvloom import Segment, TokenDatabase

CHUNK_TOKENS = 16
USUAL_CHUNK_TOKENS = 256
"""The default chunk size of engines."""
VOCABULARY = 1 << 18
FINGERPRINT = "0123456789abcdef0123456789abcdef"
_ALIKE = ("", "-", "a", "A", "a ", " a", "tenant-1", "tenant-11", "é", "e\u0301", "a\0b", "?", "\ud800", "\udfff")
SALTS = (*_ALIKE, "x" * 999 + "1", "x" * 999 + "2")

Database = Callable[..., TokenDatabase]


def some_tokens(count: int, *, seed: int = 0) -> list[int]:
    """Token ids, the same ones for the same seed."""
    return random.Random(seed).choices(range(VOCABULARY), k=count)


def segments_of(database: TokenDatabase, tokens: Sequence[int], *, salt: str = "") -> list[Segment]:
    return database.segments(torch.tensor(tokens, dtype=torch.int64), salt=salt)


def digests_of(segments: Sequence[Segment]) -> set[bytes]:
    return {one.key.digest for one in segments}
