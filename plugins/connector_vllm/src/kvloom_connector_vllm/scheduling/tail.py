"""The tail of a prompt: the whole blocks behind its last whole chunk, kept in halves, quarters and so on of a chunk.

A prompt that continues another one does not know how long that was. So a piece's end determines its start: a piece that
ends k blocks behind the beginning of its chunk has as many blocks as the lowest bit of k says. Pieces from the
beginning of the chunk to any of its blocks follow one another from the longest to the shortest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import lcm
from typing import NamedTuple

DOMAIN = b"kvloom/1/tail\0"
"""Begins what a piece's digest is made of: a chunk that ends with the same block has another name."""


class Piece(NamedTuple):
    """Part of a chunk."""

    start: int
    """Its first token, counted in the sequence."""
    end: int
    depth: int
    """Number of chunks and pieces before it."""
    digest: bytes
    """Covers every token up to its end, and its start."""


class Pieces:
    """Cuts chunks into pieces. Keeps no state, so that any thread may use it."""

    def __init__(self, *, chunk_tokens: int, block_tokens: int, hash_tokens: int, keep: bool = True) -> None:
        """hash_tokens: tokens per block hash. keep: False for an engine that keeps no tails, and has no pieces."""
        self._chunk = chunk_tokens
        self._hash = hash_tokens
        self.unit = lcm(block_tokens, hash_tokens) if keep else chunk_tokens
        """Pieces are whole numbers of so many tokens."""

    def of(self, hashes: Sequence[bytes], number: int) -> tuple[Piece, ...]:
        """All that may be kept of a chunk before it is whole, by their ends, as far as the hashes reach.

        hashes: the engine's, of the whole sequence. number: the chunk's.
        """
        first = number * self._chunk
        most = min(self._chunk - 1, len(hashes) * self._hash - first) // self.unit
        return tuple(self._piece(hashes, first, number, count) for count in range(1, most + 1))

    def _piece(self, hashes: Sequence[bytes], first: int, number: int, count: int) -> Piece:
        """The piece that ends `count` units behind the chunk's first token."""
        start, end = first + (count & (count - 1)) * self.unit, first + count * self.unit
        digest = hashlib.sha256(DOMAIN + start.to_bytes(8, "little") + hashes[end // self._hash - 1]).digest()
        return Piece(start, end, number + count.bit_count() - 1, digest)
