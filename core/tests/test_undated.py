"""A store that does not say when blobs were written: their headers do, before anything is promised."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from core_support import CHUNK, Shelf, kv_of, tokens_of

from kvloom import Engine, Entry
from kvloom.runtime import SystemRuntime

Open = Callable[..., Engine]
TOKENS, KV = tokens_of(4 * CHUNK), kv_of(4 * CHUNK)
HOUR = {"type": "shelf", "ttl": "1h"}


@pytest.fixture(autouse=True)
def _undated(monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(self: Shelf, prefix: str = "") -> Iterator[Entry]:
        for key, blob in list(self._blobs.items()):
            if key.startswith(prefix):
                yield Entry(key, len(blob), 0.0)

    monkeypatch.setattr(Shelf, "scan", scan)


def stored(open_engine: Open, monkeypatch: pytest.MonkeyPatch, *, ago: float) -> Engine:
    """An engine that has listed a store to which another wrote a prompt some seconds ago."""
    with monkeypatch.context() as past, open_engine({"type": "shelf"}) as engine:
        past.setattr(SystemRuntime, "wall", lambda self: time.time() - ago)
        engine.store(TOKENS, kv=KV)
        assert engine.flush()
    engine = open_engine(HOUR)
    until = time.monotonic() + 20
    while not engine.health().tiers[0].recovered and time.monotonic() < until:
        time.sleep(0.01)
    assert engine.health().tiers[0].blobs == 4
    return engine


def test_what_is_past_its_time_is_not_promised(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stored(open_engine, monkeypatch, ago=7200)
    assert engine.lookup(TOKENS).tokens == 0


@pytest.mark.usefixtures("hurried")
def test_once_seen_it_is_deleted(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stored(open_engine, monkeypatch, ago=7200)
    engine.lookup(TOKENS)
    until = time.monotonic() + 20
    while Shelf.shelves["default"].blobs and time.monotonic() < until:
        time.sleep(0.01)
    assert not Shelf.shelves["default"].blobs


def test_what_is_young_is_asked_about_once(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stored(open_engine, monkeypatch, ago=60)
    looked: list[str] = []
    Shelf.shelves["default"].before = lambda verb, key: looked.append(key) if verb == "get" else None
    assert engine.lookup(TOKENS).tokens == 4 * CHUNK
    first = len(looked)
    assert engine.lookup(TOKENS).tokens == 4 * CHUNK and len(looked) == first
