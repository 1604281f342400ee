"""The names of segments, which depend on their tokens, those before, the model and the salt; never on other cuts."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import Any

from kvloom import ChunkKey, Segment, salt_tag

DOMAIN = "kvloom/radix/1"

_span = struct.Struct("<QQ").pack
# tuple.__new__ makes the same values as calling the classes, at a third of the cost: there is one per segment.
_new_key: Any = partial(tuple.__new__, ChunkKey)
_new_segment: Any = partial(tuple.__new__, Segment)


def named(data: bytes, ends: Sequence[int], *, fingerprint: str, salt: str) -> list[Segment]:
    """Segments of the int32-LE tokens in `data` that end at `ends`, ascending.

    A digest is SHA-256 over fingerprint, salt, every token up to the segment's end, its start and its end. Its depth
    is its start: like the digest, it stays the same however the tokens before it are cut.
    """
    root = "\0".join((DOMAIN, fingerprint, salt)).encode(errors="surrogatepass")
    tokens = memoryview(data)
    state = hashlib.sha256(hashlib.sha256(root).digest())
    starts = [0, *ends[:-1]] if ends else []
    digests: list[bytes] = []
    append = digests.append
    for start, end in zip(starts, ends, strict=True):
        state.update(tokens[4 * start : 4 * end])
        each = state.copy()
        each.update(_span(start, end))
        append(each.digest())
    namespace = f"{fingerprint}/{salt_tag(salt)}"
    keys = map(_new_key, zip(repeat(namespace, len(digests)), starts, digests, strict=True))
    return list(map(_new_segment, zip(starts, ends, keys, strict=True)))
