"""Opening and closing engines: siblings, engines by name, and nothing left open whatever raises."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from core_support import CHUNK, SPEC, Gate, Shelf, eventually, kv_of, tokens_of

from kvloom import BackendError, ConfigError, Engine, Registry
from kvloom.builtin.plain import PlainConnector
from kvloom.config import components as config_components
from kvloom.engine import opening
from kvloom.telemetry.events import EventBus

MEMORY = {"type": "memory", "capacity": "1MiB"}
SHELF = {"type": "shelf", "deadline": "20s"}
Open = Callable[..., Engine]


def test_a_sibling_shares_tiers_but_no_keys(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF)
    tokens, kv = tokens_of(8), kv_of(8)
    engine.store(tokens, kv=kv)
    other = engine.sibling(replace(SPEC, adapters=["lora"]))
    assert other.lookup(tokens).tokens == 0
    other.store(tokens, kv=-kv)
    got = torch.zeros_like(kv)
    assert engine.retrieve(tokens, kv=got).all() and torch.equal(got, kv)
    other.close()
    assert engine.lookup(tokens).tokens == 8, "closing a sibling leaves the tiers open"


def test_a_sibling_with_settings_of_its_own_has_another_shape(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF)
    spec = replace(SPEC, num_layers=SPEC.num_layers + 1)
    with pytest.raises(ValueError, match="shape and dtype"):
        engine.sibling(spec)
    with pytest.raises(ValueError, match="shape and dtype"):
        engine.sibling(replace(spec, dtype="float64"), engine.config)
    other, tokens, kv = engine.sibling(spec, engine.config), tokens_of(8), kv_of(8)
    longer = torch.cat([kv, kv[:, :1] + 1], dim=1)
    other.store(tokens, kv=longer)
    engine.store(tokens, kv=kv)
    assert engine.flush(20)
    for memory in ("there", "emptied"):
        got, whole = torch.zeros_like(kv), torch.zeros_like(longer)
        assert engine.retrieve(tokens, kv=got).all() and torch.equal(got, kv), memory
        assert other.retrieve(tokens, kv=whole).all() and torch.equal(whole, longer), memory
        engine.memory.remove(engine.memory.chunks())


def test_closing_goes_on_past_what_raises(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no device")

    engine = open_engine(MEMORY, SHELF)
    closed: list[str] = []
    shelf, pool = Shelf.shelves["default"], engine._stack.memory.pool
    sibling = engine.sibling(replace(SPEC, adapters=["lora"]))
    engine.store(tokens_of(8), kv=kv_of(8))
    monkeypatch.setattr(sibling._tokens, "close", broken)
    monkeypatch.setattr(engine.connector, "close", broken)
    monkeypatch.setattr(shelf, "close", lambda: closed.append("shelf"))
    tier = engine.tiers["shelf"]
    tier.closes_too(broken)
    tier.closes_too(lambda: closed.append("with it"))
    monkeypatch.setattr(engine._events, "close", lambda: closed.append("events"))
    with pytest.raises(RuntimeError, match="no device"):
        engine.close()
    assert closed == ["shelf", "with it", "events"] and pool.pages._closed
    assert len(shelf.blobs) == 2, "what was accepted is written"
    engine.close()


@pytest.mark.parametrize("verb", ["store", "retrieve"])
def test_closing_waits_for_a_call_under_way_before_parts_are_closed(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    engine, gate, order = open_engine(MEMORY), Gate(), list[str]()
    tokens, kv = tokens_of(8), kv_of(8)
    if verb == "retrieve":
        engine.store(tokens, kv=kv)
    copy = "read" if verb == "store" else "write"
    move, learn = getattr(PlainConnector, copy), engine._tokens.learn

    def slow(*given: Any, **where: Any) -> None:
        gate(copy, "")
        move(*given, **where)
        order.append("copied")

    monkeypatch.setattr(PlainConnector, copy, slow)
    monkeypatch.setattr(engine.connector, "close", lambda: order.append("connector"))
    monkeypatch.setattr(engine._tokens, "close", lambda: order.append("tokens"))
    monkeypatch.setattr(engine._tokens, "learn", lambda *a, **k: (order.append("learnt"), learn(*a, **k)))
    with ThreadPoolExecutor(2) as pool:
        called = pool.submit(getattr(engine, verb), tokens, kv=kv.clone())
        try:
            gate.reached()
            closed = pool.submit(engine.close)
            assert eventually(lambda: engine._closed)
            with pytest.raises(BackendError, match="closed"):
                engine.store(tokens, kv=kv)
            assert not order
        finally:
            gate.open()
        assert int(called.result().sum() if verb == "retrieve" else called.result()) == 8
        closed.result()
    assert order == ["copied", *(["learnt"] if verb == "store" else []), "connector", "tokens"]


def test_closing_goes_on_past_a_call_that_does_not_end(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, gate = open_engine(MEMORY, SHELF | {"deadline": "50ms"}), Gate()
    monkeypatch.setattr(PlainConnector, "read", lambda *_, **__: gate("read", ""))
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(engine.store, tokens_of(8), kv=kv_of(8))
        gate.reached()
        engine.close()
        assert not called.done()
        gate.open()
        called.exception()


def test_closing_an_index_goes_on_past_what_raises(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no device")

    config = {"chunk_tokens": CHUNK, "connector": "plain", "tiers": [SHELF]}
    index = Engine.open(config, SPEC, role="index", registry=registry)
    closed: list[str] = []
    monkeypatch.setattr(index.connector, "close", broken)
    monkeypatch.setattr(Shelf.shelves["default"], "close", lambda: closed.append("shelf"))
    with pytest.raises(RuntimeError, match="no device"):
        index.close()
    assert closed == ["shelf"]


@pytest.mark.parametrize("role", ["engine", "index"])
def test_what_was_opened_is_closed_if_the_engine_cannot_be(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, role: Any
) -> None:
    closed: list[type] = []
    monkeypatch.setattr(PlainConnector, "representation", {"dtype": torch.uint8})
    for part in (PlainConnector, Shelf, EventBus):
        monkeypatch.setattr(part, "close", lambda part: closed.append(type(part)))
    config = {"chunk_tokens": CHUNK, "connector": "plain", "tiers": [SHELF]}
    with pytest.raises(TypeError, match="JSON"):
        Engine.open(config, SPEC, role=role, registry=registry)
    assert closed == [Shelf, EventBus, PlainConnector]


def test_a_store_that_hangs_while_it_is_opened_is_named_and_closed_later(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, closed = Gate(), list[object]()
    monkeypatch.setattr(opening, "OPENING_SECONDS", 0.05)
    monkeypatch.setattr(Shelf, "check_writable", lambda shelf: gate("check_writable", ""))
    monkeypatch.setattr(Shelf, "close", lambda shelf: closed.append(shelf))
    with pytest.raises(ConfigError, match=r"tiers\.1: did not open within 0\.05 s; see whether"):
        open_engine(MEMORY, SHELF | {"deadline": "50ms"})
    assert not closed
    gate.open()
    assert eventually(lambda: len(closed) == 1)


@pytest.mark.parametrize("kind", ["tokens", "serializer", "observer"])
def test_a_component_that_hangs_while_it_is_opened_is_named(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    gate, name = Gate(), {"tokens": "chunked", "serializer": "raw", "observer": "log"}[kind]
    monkeypatch.setattr(opening, "OPENING_SECONDS", 0.05)
    hangs = type("Hangs", (registry.get(kind, name),), {"__init__": lambda *_, **__: gate(kind, "")})
    monkeypatch.setattr(config_components.Choice, "cls", property(lambda it: hangs if it.type == name else it.load()))
    config = {"connector": "plain", "tiers": ["memory", SHELF], "observers": ["log"]}
    at = {"tokens": "tokens", "serializer": "tiers.1.serializer", "observer": "observers.0"}[kind]
    with pytest.raises(ConfigError, match=rf"^{re.escape(at)}: did not open within 0\.05 s; see whether"):
        Engine.open(config, SPEC, registry=registry)
    gate.open()


def test_what_was_opened_is_closed_if_the_sibling_cannot_be(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    engine = open_engine(SHELF)
    with monkeypatch.context() as patch:
        patch.setattr(PlainConnector, "close", lambda connector: closed.append(connector))
        patch.setattr(type(engine._tokens), "__init__", broken)
        with pytest.raises(ZeroDivisionError):
            engine.sibling(replace(SPEC, adapters=["lora"]))
    assert len(closed) == 1 and closed[0] is not engine.connector
    engine.store(tokens_of(8), kv=kv_of(8))


def test_get_or_create_get_and_destroy() -> None:
    config = {"chunk_tokens": CHUNK, "tiers": [MEMORY]}
    assert Engine.get("one") is None
    engine = Engine.get_or_create("one", config, SPEC)
    try:
        assert Engine.get_or_create("one", config, SPEC) is engine is Engine.get("one")
        with pytest.raises(ValueError, match="'one' exists with another configuration"):
            Engine.get_or_create("one", config | {"chunk_tokens": 8}, SPEC)
        with pytest.raises(ValueError, match="'one' exists with another spec"):
            Engine.get_or_create("one", config, replace(SPEC, model="other"))
    finally:
        Engine.destroy("one")
    assert Engine.get("one") is None
    Engine.destroy("one")


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ({}, "expected kv="),
        ({"kv": torch.zeros(2, 2, 3, 8, dtype=torch.bfloat16)}, "kv: expected"),
        ({"kv": torch.zeros(2, 2, 8, 8)}, "kv: expected"),
        ({"kv": kv_of(8), "slots": 1}, "expected kv="),
    ],
)
def test_kv_of_the_wrong_kind_is_refused(open_engine: Open, where: dict[str, object], says: str) -> None:
    engine = open_engine()
    for verb in (engine.store, engine.retrieve):
        with pytest.raises(ValueError, match=says):
            verb(tokens_of(8), **where)


def test_a_closed_engine_says_so(open_engine: Open) -> None:
    engine = open_engine()
    engine.close()
    engine.close()
    with pytest.raises(BackendError, match="closed"):
        engine.prefetch(tokens_of(8))


@pytest.mark.parametrize("above", [(), (MEMORY,)], ids=["memory", "stored"])
@pytest.mark.parametrize("bound", ["capacity", "quota"])
def test_a_bound_below_what_one_chunk_takes_is_refused(
    open_engine: Open, above: tuple[dict[str, object], ...], bound: str
) -> None:
    tier, least = (SHELF | {"capacity": "1MiB"}, 8192) if above else (MEMORY, 4096)
    tokens, kv = tokens_of(CHUNK), kv_of(CHUNK)

    def opened(size: int) -> Engine:
        return open_engine(*above, tier | {bound: size if bound == "capacity" else {"*": size}})

    with pytest.raises(ValueError, match=rf"tiers\.{len(above)}\.{bound}: .*less than one chunk takes \({least} bytes"):
        opened(least - 1)
    engine = opened(least)
    engine.store(tokens, kv=kv)
    assert engine.flush(20) and list(engine.tiers.values())[-1].contains(engine.segments(tokens)[0].key)
