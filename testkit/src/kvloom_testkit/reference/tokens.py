"""A token database that cuts after every `chunk_tokens` tokens, by the shortest way that is right."""

from __future__ import annotations

import hashlib

import torch

from kvloom import ChunkKey, Segment, TokenDatabase, salt_tag, select


class EvenTokenDatabase(TokenDatabase):
    """Segments of `chunk_tokens` tokens; the digest of each covers that of the one before."""

    type = "kit_even"

    def segments(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:
        found: list[Segment] = []
        for start, end in self.cuts(tokens, salt):
            digest = self.digest(found[-1].key.digest if found else self.root(salt), tokens[start:end])
            found.append(Segment(start, end, ChunkKey(self.namespace(salt), len(found), digest)))
        return found[select(found, mask, tokens.numel()) :]

    def cuts(self, tokens: torch.Tensor, salt: str) -> list[tuple[int, int]]:
        """Start and end of each segment of a sequence."""
        ends = range(self.chunk_tokens, tokens.numel() + 1, self.chunk_tokens)
        return [(end - self.chunk_tokens, end) for end in ends]

    def namespace(self, salt: str) -> str:
        return f"{self.fingerprint}/{salt_tag(salt)}"

    def root(self, salt: str) -> bytes:
        """The digest before the first segment."""
        return hashlib.sha256(f"{self.type}\0{self.fingerprint}\0{salt}".encode(errors="surrogatepass")).digest()

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        """The digest of a segment: of all tokens up to its end."""
        return hashlib.sha256(before + tokens.to(torch.int64).numpy().astype("<i8").tobytes()).digest()
