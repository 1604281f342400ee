"""A store goes on before a tier has said what it has: that is found out before anything is written to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_support import Gate, Shelf, kv_of, tokens_of

from kvloom import BackendError, Engine

MEMORY = {"type": "memory", "capacity": "1MiB"}
FAR = {"type": "shelf", "deadline": "20s"}
TOKENS, KV = tokens_of(16), kv_of(16)
Open = Callable[..., Engine]
Store = Callable[[Engine], None]


def _whole(engine: Engine) -> None:
    engine.store(TOKENS, kv=KV)


def _by_layer(engine: Engine) -> None:
    with engine.store_layer(TOKENS, kv=KV) as storing:
        for layer in range(storing.num_layers):
            storing.layer(layer)
        storing.finish()


stores = pytest.mark.parametrize("store", [_whole, _by_layer])


def silent(gate: Gate, puts: list[str]) -> Shelf:
    """The shelf, which says what it has once the gate is open; and what is put there from now on."""
    shelf = Shelf.shelves["default"]

    def before(verb: str, key: str) -> None:
        if verb == "put" and not key.startswith("spec/"):
            puts.append(key)
        elif verb == "contains":
            gate(verb, key)

    shelf.before = before
    return shelf


def dropped(engine: Engine) -> dict[str, int]:
    return {key.reason: totals.chunks for key, totals in engine.counters().items() if key.name == "dropped"}


@stores
def test_what_it_lacks_is_written_once_it_has_said_so(open_engine: Open, gate: Gate, store: Store) -> None:
    engine, puts = open_engine(MEMORY, FAR), list[str]()
    shelf = silent(gate, puts)
    store(engine)
    assert not puts and not engine.flush(0), "it is still to be written"
    assert engine.health().tiers[-1].waiting_bytes == KV.nbytes
    gate.open()
    assert engine.flush(20) and len(shelf.blobs) == len(puts) == 4 and not dropped(engine)


@stores
def test_what_it_has_is_not_written_again(open_engine: Open, gate: Gate, store: Store) -> None:
    with open_engine(FAR) as engine:
        store(engine)
    engine, puts = open_engine(MEMORY, FAR), list[str]()
    silent(gate, puts)
    store(engine)
    gate.open()
    assert engine.flush(20) and not puts and not dropped(engine)
    assert engine.health().tiers[-1].blobs == 4


def test_what_memory_has_too_is_written_behind(open_engine: Open, gate: Gate) -> None:
    engine, puts = open_engine(MEMORY, FAR), list[str]()
    _whole(engine)
    assert engine.flush(20)
    shelf = Shelf.shelves["default"]
    shelf._blobs.clear()
    engine.tiers["shelf"]._existence.doubt()  # type: ignore[attr-defined]
    silent(gate, puts)
    _whole(engine)
    gate.open()
    assert engine.flush(20) and len(shelf.blobs) == len(puts) == 4


def test_without_memory_it_is_copied_for_the_tier_that_may_lack_it(open_engine: Open, gate: Gate) -> None:
    engine, puts = open_engine(FAR | {"deadline": "1s"}), list[str]()
    shelf = silent(gate, puts)
    engine.store(TOKENS, kv=(kv := KV.clone()))
    kv.zero_()
    gate.open()
    assert engine.flush(20) and len(puts) == 4
    shelf.before = lambda verb, key: None
    got = torch.zeros_like(KV)
    assert engine.retrieve(TOKENS, kv=got).all() and torch.equal(got, KV)


def test_what_is_removed_meanwhile_is_gone(open_engine: Open, gate: Gate) -> None:
    engine, puts = open_engine(MEMORY, FAR), list[str]()
    shelf = silent(gate, puts)
    _whole(engine)
    gate.reached()
    removing = engine._runtime.spawn(lambda: engine.remove(TOKENS), name="remover")
    gate.open()
    removing.join(20)
    assert engine.flush(20) and not shelf.blobs and not engine.lookup(TOKENS).tokens


def test_a_store_that_never_says_loses_the_writes_and_is_charged_once(open_engine: Open, gate: Gate) -> None:
    engine, puts = open_engine(MEMORY, FAR | {"deadline": "300ms"}), list[str]()
    shelf = silent(gate, puts)
    _whole(engine)
    assert engine.flush(20) and not shelf.blobs and not puts
    assert dropped(engine) == {"write failed: BackendError": 4}
    errors = {key.reason: totals.count for key, totals in engine.counters().items() if key.name == "tier_error"}
    assert errors == {"contains: deadline": 1}
    assert not engine.health().tiers[-1].waiting_bytes and engine.lookup(TOKENS, ["memory"]).tokens == 16


def test_a_store_that_fails_to_say_is_not_written_to(open_engine: Open) -> None:
    engine = open_engine(MEMORY, FAR)
    shelf: Any = Shelf.shelves["default"]

    def fail(verb: str, key: str) -> None:
        if verb == "contains":
            raise BackendError("no route")

    shelf.before = fail
    _whole(engine)
    assert engine.flush(20) and not shelf.blobs
