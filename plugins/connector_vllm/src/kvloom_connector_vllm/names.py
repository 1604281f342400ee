"""The keys of an engine's chunks: its own block hashes, under kvloom's fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from kvloom import ChunkKey, KVSpec, MemoryFormat, Segment, fingerprint, salt_tag

from .paged.settings import Geometry
from .plan import Chunks, Owner


def owner_of(adapter: str, salt: str) -> Owner:
    """adapter: as `Adapters.of` has it. salt: of the request, or of all."""
    return Owner(adapter, salt_tag(salt))


DOMAIN = b"kvloom/1/group\0"
"""Begins what the digest of a chunk is made of, in every group but the first."""


class Names:
    """Names of one rank's chunks of one group of layers: each holds another part of the KV, under a fingerprint of its
    own."""

    def __init__(
        self, spec: KVSpec, geometry: Geometry, format: MemoryFormat, *, chunk_tokens: int, group: int = 0
    ) -> None:
        """group: number of the group. Those of the first have the engine's hashes as digests; others, digests of their
        own, because a tier finds a chunk by its digest."""
        self._own = group > 0
        self._spec = spec
        self._about = (format, geometry.representation)
        self._chunk_tokens = chunk_tokens
        self._namespaces: dict[Owner, str] = {}

    def segments(self, chunks: Chunks) -> list[Segment]:
        """The chunks and pieces with their places in the sequence and their keys."""
        namespace, step = self.namespace(chunks.owner), self._chunk_tokens
        whole = [
            Segment(number * step, (number + 1) * step, ChunkKey(namespace, number, digest))
            for number, digest in enumerate(chunks.digests, chunks.first)
        ]
        whole += [
            Segment(start, end, ChunkKey(namespace, depth, digest)) for start, end, depth, digest in chunks.pieces
        ]
        if not self._own:
            return whole
        begun = hashlib.sha256(DOMAIN + namespace.encode())
        return [one._replace(key=one.key._replace(digest=_digest(begun, one.key.digest))) for one in whole]

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
            self._namespaces[owner] = known
        return known


def _digest(begun: hashlib._Hash, more: bytes) -> bytes:
    """Of what has been begun, and more."""
    whole = begun.copy()
    whole.update(more)
    return whole.digest()
