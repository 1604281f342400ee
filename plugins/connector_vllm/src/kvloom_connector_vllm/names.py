"""The keys of an engine's chunks: its own block hashes, under kvloom's fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache

from kvloom import ChunkKey, KVSpec, MemoryFormat, Segment, fingerprint, salt_tag

from .paged.settings import Geometry
from .scheduling.plan import Chunks, Owner


def owner_of(adapter: str, salt: str) -> Owner:
    """adapter: as `Adapters.of` has it. salt: of the request, or of all."""
    return Owner(adapter, salt_tag(salt))


class Names:
    """Names of one part of the chunks of one group of layers: each rank holds another part of the KV, or several of its
    heads, under fingerprints of their own."""

    def __init__(self, spec: KVSpec, geometry: Geometry, format: MemoryFormat, *, chunk_tokens: int) -> None:
        self._spec = spec
        self._about = (format, geometry.representation)
        self._chunk_tokens = chunk_tokens
        self._namespaces: dict[Owner, str] = {}
        self._made: set[str] = set()

    def made(self, key: ChunkKey) -> bool:
        """Return whether it is the key of a chunk of an owner that was asked for lately."""
        return key.namespace in self._made

    def segments(self, chunks: Chunks) -> list[Segment]:
        """The chunks and pieces with their places in the sequence and their keys."""
        namespace, step = self.namespace(chunks.owner), self._chunk_tokens
        mask = _mask(namespace)
        whole = [
            Segment(number * step, (number + 1) * step, ChunkKey(namespace, number, _masked(digest, mask)))
            for number, digest in enumerate(chunks.digests, chunks.first)
        ]
        return whole + [
            Segment(start, end, ChunkKey(namespace, depth, _masked(digest, mask)))
            for start, end, depth, digest in chunks.pieces
        ]

    def namespace(self, owner: Owner) -> str:
        """`<fingerprint>/<salt tag>`."""
        known = self._namespaces.get(owner)
        if known is None:
            adapters = (owner.adapter,) if owner.adapter else ()
            since = f", since reset {owner.generation}" if owner.generation else ""
            spec = replace(self._spec, adapters=adapters, revision=self._spec.revision + since)
            known = f"{fingerprint(spec, *self._about)}/{owner.tenant}"
            if len(self._namespaces) > 4096:  # salts come and go
                self._namespaces.clear()
                self._made.clear()
            self._namespaces[owner] = known
            self._made.add(known)
        return known


def hash_of(key: ChunkKey) -> bytes:
    """The engine's hash that a key was made of."""
    return _masked(key.digest, _mask(key.namespace))


def _masked(digest: bytes, mask: int) -> bytes:
    """A digest that differs by namespace; masked again, it is the engine's hash.

    The hash is the same for all models, ranks and groups, and a tier tells chunks apart by their digests alone.
    """
    return (int.from_bytes(digest, "big") ^ mask).to_bytes(32, "big")


@lru_cache(maxsize=4096)
def _mask(namespace: str) -> int:
    return int.from_bytes(hashlib.sha256(namespace.encode()).digest(), "big")
