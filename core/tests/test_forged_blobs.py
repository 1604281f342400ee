"""What others may put into a store on purpose, with checksums that are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from core_support import CHUNK, Shelf, kv_of, tokens_of

from kvloom import Engine, envelope
from kvloom.errors import LaterVersionError

TOKENS, KV = tokens_of(2 * CHUNK), kv_of(2 * CHUNK)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"shape":' * 100_000, b"[]", b"3", b"{}"])
def test_a_description_that_is_none_is_not_for_this_process(text: bytes) -> None:
    with pytest.raises(LaterVersionError):
        envelope._describe(text)


def damaged(engine: Engine) -> dict[str, bytes]:
    """Store a prompt, and flip a bit of each of its blobs."""
    engine.store(TOKENS, kv=KV)
    assert engine.flush()
    shelf = Shelf.shelves["default"]
    for name, blob in shelf.blobs.items():
        shelf._blobs[name] = blob[:-1] + bytes([blob[-1] ^ 1])
    return shelf.blobs


def retrieved(engine: Engine) -> int:
    return int(engine.retrieve(TOKENS, kv=torch.zeros_like(KV)).sum())


@pytest.mark.parametrize("claim", ["bounded", "one_by_one"])
def test_far_away_a_corrupt_blob_is_a_miss_and_stays_until_it_is_stored_anew(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, claim: str
) -> None:
    monkeypatch.setattr(Shelf, claim, True)
    engine = open_engine({"type": "shelf"})
    blobs = damaged(engine)
    assert retrieved(engine) == 0
    assert Shelf.shelves["default"].blobs == blobs, "it may be good for everybody else"
    assert engine.lookup(TOKENS).tokens == 0, "it is not promised"
    for _ in range(2):  # each is found out when it is read
        engine.store(TOKENS, kv=KV)
        assert engine.flush()
        there = retrieved(engine)
    assert there == 2 * CHUNK


def test_nearby_a_corrupt_blob_is_deleted(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine({"type": "shelf"})
    damaged(engine)
    assert retrieved(engine) == 0
    head = engine.segments(TOKENS)[0].key
    assert str(head) not in Shelf.shelves["default"].blobs
