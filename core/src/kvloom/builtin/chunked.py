"""Segments of a fixed number of tokens, keyed by a chain of SHA-256."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvloom import Segment, TokenDatabase, chain, int32_tokens, pieces, select

if TYPE_CHECKING:
    import torch


class ChunkedTokenDatabase(TokenDatabase):
    """Every `chunk_tokens` tokens are a segment, and what is left at the end is cut into pieces of a chunk.

    Without `save_tails`, what is left at the end is left to the engine.
    """

    type = "chunked"

    def segments(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:
        about = self._about(salt)
        found = chain(tokens, **about)
        if self.save_tails:
            found += pieces(tokens, found[-1] if found else None, own=True, **about)
        return found[select(found, mask, tokens.numel()) :]

    def pieces(self, tokens: torch.Tensor, start: int, *, salt: str = "") -> list[Segment]:
        if not self.save_tails:
            return []
        about, narrow = self._about(salt), int32_tokens(tokens)
        first = start // self.chunk_tokens * self.chunk_tokens
        before = next(reversed(chain(narrow[:first], **about)), None)
        end = first + self.chunk_tokens
        if end > len(narrow):  # the segment at `start` is a piece itself
            end = next((one.end for one in pieces(narrow, before, own=True, **about) if one.start == start), start)
        return [piece for piece in pieces(narrow, before, **about) if start <= piece.start and piece.end < end]

    def possible(self, tokens: torch.Tensor, *, salt: str = "") -> list[Segment]:
        about, narrow = self._about(salt), int32_tokens(tokens)
        whole = chain(narrow, **about)
        return [*whole, *(piece for before in (None, *whole) for piece in pieces(narrow, before, **about))]

    def _about(self, salt: str) -> dict[str, Any]:
        return {"chunk_tokens": self.chunk_tokens, "fingerprint": self.fingerprint, "salt": salt}
