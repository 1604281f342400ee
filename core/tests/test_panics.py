"""A library that raises what is no Exception, as native code does that panics, ends nobody else's work."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from clock_support import SkippingClock
from core_support import CHUNK, Shelf, Witness, kv_of, tokens_of

from kvloom import ConfigError, Engine

Open = Callable[..., Engine]
TOKENS, KV = tokens_of(2 * CHUNK), kv_of(2 * CHUNK)


class Panic(BaseException):
    """A panic like pyo3's."""


def panics(*_: object) -> None:
    raise Panic("called `Option::unwrap()` on a `None` value")


@pytest.mark.parametrize("kind", [Panic, SystemExit])
@pytest.mark.parametrize("verb", ["__init__", "identity", "check_writable"])
def test_opening_says_which_tier_it_is(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], verb: str
) -> None:
    def broken(*_: object) -> None:
        raise kind("on a `None` value")

    monkeypatch.setattr(Shelf, verb, broken)
    with pytest.raises(ConfigError) as caught:
        open_engine({"type": "shelf"})
    assert str(caught.value) == f"tiers.0: 'shelf' broke off with {kind.__name__}: on a `None` value"


def test_an_interrupt_stays_one(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Shelf, "identity", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_engine({"type": "shelf"})


@pytest.mark.parametrize("verb", ["put", "get", "contains"])
def test_serving_goes_on(open_engine: Open, skipping: SkippingClock, verb: str) -> None:
    engine = open_engine({"type": "shelf"})
    shelf = Shelf.shelves["default"]

    def before(said: str, key: str) -> None:
        if said == verb:
            panics()

    if verb == "get":
        engine.store(TOKENS, kv=KV)
        engine.flush()
    shelf.before = before
    engine.store(TOKENS, kv=KV)
    engine.flush()
    engine.lookup(TOKENS)
    assert not engine.retrieve(TOKENS, kv=torch.zeros_like(KV)).any()
    assert any(count.name == "tier_error" for count in engine.counters())
    shelf.before = lambda verb, key: None
    skipping.skip(60)
    until = time.monotonic() + 20
    while not engine.retrieve(TOKENS, kv=torch.zeros_like(KV)).all():
        assert time.monotonic() < until, "the tier is back after a pause"
        engine.store(TOKENS, kv=KV)
        engine.flush()
        time.sleep(0.005)


def test_an_observer_that_panics_as_a_request_begins_is_counted(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine("memory", observers=["witness"])
    monkeypatch.setattr(Witness, "caller", panics)
    assert not engine.retrieve(TOKENS, kv=torch.zeros_like(KV)).any()
    assert [count.reason for count in engine.counters() if count.name == "observer_error"] == ["witness"]

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Witness, "caller", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.retrieve(TOKENS, kv=torch.zeros_like(KV))
