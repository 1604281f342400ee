"""Derives from a chunk's key the hashes of its blocks, and the tokens of each block."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvloom import ChunkKey, Segment
from kvloom_events_zmq.wire import Hash

_NAME_BYTES = 256
"""Approximate memory of a chunk beside its tokens."""


class Named(NamedTuple):
    """The owner of a chunk's KV."""

    parent: ChunkKey | None
    start: int
    tokens: bytes
    """Its own, int32-LE."""


class Names:
    """The tokens of chunks that were stored or retrieved lately: at most `max_bytes` of them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._named: OrderedDict[bytes, Named] = OrderedDict()

    def learn(self, segments: Sequence[Segment], tokens: bytes) -> None:
        """segments: those of a sequence, from its start. tokens: int32-LE."""
        parent: ChunkKey | None = None
        for start, end, key in segments:
            if key.digest in self._named:
                self._named.move_to_end(key.digest)
            else:
                self._named[key.digest] = Named(parent, start, tokens[4 * start : 4 * end])
                self._bytes += 4 * (end - start) + _NAME_BYTES
            parent = key
        while self._bytes > self._max_bytes and self._named:
            _, oldest = self._named.popitem(last=False)
            self._bytes -= len(oldest.tokens) + _NAME_BYTES

    def of(self, key: ChunkKey) -> Named | None:
        return self._named.get(key.digest)


def block_hashes(key: ChunkKey, count: int, form: Literal["int", "bytes"]) -> list[Hash]:
    """The hashes of a chunk's blocks. The last one is the chunk's own digest, so that it is the next one's parent.

    form: `int` is the last 64 bits, as vLLM publishes by default.
    """
    inner = [hashlib.sha256(key.digest + index.to_bytes(4, "little")).digest() for index in range(count - 1)]
    digests = [*inner, key.digest]
    return [int.from_bytes(one[-8:], "big") for one in digests] if form == "int" else list(digests)
