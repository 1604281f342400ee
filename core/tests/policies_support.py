"""Support for the tests of a tier's policies: a small shelf, filled by seeds, with its content and counts."""

from __future__ import annotations

from collections.abc import Callable

from core_support import eventually as eventually
from core_support import kv_of, tokens_of

from kvloom import Engine

MEMORY = {"type": "memory", "capacity": "1MiB"}
SHELF = {"type": "shelf", "deadline": "20s"}
BLOB_BYTES = 8192
"""Size of one chunk's blob: a page of header and a page of payload."""
Open = Callable[..., Engine]
TOKENS, KV = tokens_of(16), kv_of(16)


def count(engine: Engine, name: str, reason: str = "") -> int:
    return sum(
        totals.chunks for key, totals in engine.counters().items() if key.name == name and key.reason.startswith(reason)
    )


def stored(engine: Engine, *seeds: int, length: int = 16, salt: str = "") -> None:
    for seed in seeds:
        engine.store(tokens_of(length, seed), kv=kv_of(length, seed), salt=salt)
        assert engine.flush(20)


def held(engine: Engine, seed: int, *, tier: str = "shelf", salt: str = "") -> int:
    return engine.lookup(tokens_of(16, seed), [tier], salt=salt).tokens
