"""Announces chunks that entered or left kvloom's tiers, for routers that send requests to where their KV is."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from kvloom import ChunkKey

from ..names import hash_of
from .plan import Chunks

_MOST_CHUNKS = 1 << 17
"""Chunks that are remembered with their tokens: a removal names the blocks that a chunk was."""
_MOST_TOKENS = 1 << 24
"""Tokens of those chunks together, four bytes each."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The engine's blocks of one chunk, by their own hashes."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: array[int]
    adapter: Any = None
    """The engine's own request for a LoRA adapter, if there was one."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """Something that a router would like to know."""

    what: Literal["stored", "removed", "cleared"]
    medium: str
    """`CPU` for memory, `STORAGE` for tiers that other processes share."""
    blocks: Blocks | None = None


class Announcer:
    """Puts announcements together. Of several ranks, the first speaks for all: a hint, as all that tiers say is."""

    def __init__(self, *, chunk_tokens: int, hash_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._hash_tokens = hash_tokens
        self._known: dict[bytes, Blocks] = {}
        self._tokens = 0
        self._pending: list[Announcement] = []

    def learn(self, request: Any, chunks: Chunks) -> None:
        """A request's chunks are being saved or loaded. request: the engine's, with its hashes and tokens."""
        step = self._chunk_tokens // self._hash_tokens
        for number, digest in enumerate(chunks.digests, chunks.first):
            if digest in self._known:
                continue
            first, last = number * step, (number + 1) * step
            hashes = tuple(map(bytes, request.block_hashes[first:last]))
            parent = bytes(request.block_hashes[first - 1]) if first else None
            tokens = array("i", request.all_token_ids[number * self._chunk_tokens : (number + 1) * self._chunk_tokens])
            self._known[digest] = Blocks(hashes, parent, tokens, request.lora_request)
            self._tokens += len(tokens)
        while len(self._known) > _MOST_CHUNKS or self._tokens > _MOST_TOKENS:
            self._tokens -= len(self._known.pop(next(iter(self._known))).tokens)

    def came(self, keys: Iterable[ChunkKey], medium: str) -> None:
        self._note("stored", map(hash_of, keys), medium)

    def stored(self, chunks: Chunks, medium: str) -> None:
        self._note("stored", chunks.digests, medium)

    def left(self, keys: Iterable[ChunkKey], medium: str) -> None:
        self._note("removed", map(hash_of, keys), medium)

    def cleared(self) -> None:
        self._pending.append(Announcement("cleared", ""))

    def take(self) -> list[Announcement]:
        """Those since the last call."""
        taken, self._pending = self._pending, []
        return taken

    def _note(self, what: Literal["stored", "removed"], digests: Iterable[bytes], medium: str) -> None:
        for digest in digests:
            blocks = self._known.get(digest)
            if blocks is not None:  # of others, who knows what tokens they are
                self._pending.append(Announcement(what, medium, blocks))
