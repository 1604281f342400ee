"""An engine over a store whose memory is mapped, for the tests of mapped chunks."""

from __future__ import annotations

from typing import Any

from core_support import Shelf, Window
from faults_support import KV, TOKENS, Open

from kvloom import Engine

WINDOW = {"type": "window", "deadline": "20s"}


def window(name: str = "default") -> Window:
    found = Shelf.shelves[name]
    assert isinstance(found, Window)
    return found


def filled(open_engine: Open, *tiers: dict[str, object], **settings: Any) -> Engine:
    """An engine over a window that another one has filled."""
    with open_engine(WINDOW) as engine:
        engine.store(TOKENS, kv=KV)
    return open_engine(*(tiers or (WINDOW,)), **settings)


def mapped(engine: Engine, tier: str = "window") -> int:
    return len(engine.tiers[tier]._mapped)  # type: ignore[attr-defined]
