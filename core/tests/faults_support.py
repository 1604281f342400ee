"""A store that can be damaged, and what a retrieve makes of it."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
import xxhash
from core_support import CHUNK, Shelf, kv_of, matches, tokens_of

from kvloom import Engine

MEMORY = {"type": "memory", "capacity": "1MiB"}
SHELF = {"type": "shelf", "deadline": "20s"}
Open = Callable[..., Engine]
TOKENS, KV = tokens_of(16), kv_of(16)


def filled(open_engine: Open, *tiers: dict[str, object]) -> Shelf:
    with open_engine(*(tiers or (SHELF,))) as engine:
        engine.store(TOKENS, kv=KV)
    return Shelf.shelves["default"]


def chunk_names(engine: Engine) -> list[str]:
    return [str(segment.key) for segment in engine.segments(TOKENS)]


def retrieve(engine: Engine) -> list[bool]:
    """Per chunk, whether it was retrieved; asserts that nothing wrong was."""
    got = torch.zeros_like(KV)
    mask = engine.retrieve(TOKENS, kv=got)
    assert matches(got, KV, mask)
    return mask[::CHUNK].tolist()


def count(engine: Engine, name: str) -> int:
    return sum(totals.count for key, totals in engine.counters().items() if key.name == name)


def misses(engine: Engine) -> dict[str, int]:
    """Chunks that were asked for and not given, by reason."""
    counters = engine.counters().items()
    return {key.reason: totals.chunks for key, totals in counters if key.name == "missed" and not key.tier}


def later_version(blob: bytes) -> bytes:
    data = bytearray(blob)
    struct.pack_into("<H", data, 8, 9)
    size = struct.unpack_from("<I", data, 12)[0]
    data[40:56] = bytes(16)
    data[40:56] = xxhash.xxh3_128_digest(data[:size])
    return bytes(data)


DAMAGE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "truncated": lambda blob, other: blob[:-1],
    "cut in the header": lambda blob, other: blob[:100],
    "extended": lambda blob, other: blob + b"\0",
    "bit flipped in the payload": lambda blob, other: blob[:-1] + bytes([blob[-1] ^ 1]),
    "bit flipped in the header": lambda blob, other: blob[:130] + bytes([blob[130] ^ 1]) + blob[131:],
    "swapped": lambda blob, other: other,
    "empty": lambda blob, other: b"",
    "foreign": lambda blob, other: b"%PDF-1.7 " * 999,
}
