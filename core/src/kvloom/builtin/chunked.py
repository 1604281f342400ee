"""Segments of a fixed number of tokens, keyed by a chain of SHA-256."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvloom import Segment, TokenDatabase, chain, select

if TYPE_CHECKING:
    import torch


class ChunkedTokenDatabase(TokenDatabase):
    """Every `chunk_tokens` tokens are a segment; a tail that fills none is left to the engine."""

    type = "chunked"

    def segments(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:
        whole = chain(tokens, chunk_tokens=self.chunk_tokens, fingerprint=self.fingerprint, salt=salt)
        return whole[select(whole, mask, tokens.numel()) :]
