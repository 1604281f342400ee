"""A tier that is written when memory lets go: what is written, what is not again, and what holds nobody up."""

from __future__ import annotations

import time

import torch
from core_support import Shelf, kv_of, tokens_of
from policies_support import BLOB_BYTES, KV, MEMORY, SHELF, TOKENS, Open, count, held, stored

BEHIND = SHELF | {"write": "on_evict"}


def test_what_memory_lets_go_is_written_and_found_again(open_engine: Open) -> None:
    engine = open_engine({"type": "memory", "capacity": "64KiB"}, BEHIND)
    engine.store(tokens_of(16, 1), kv=kv_of(16, 1))
    assert engine.flush(20) and not Shelf.shelves["default"].blobs, "not before"
    for seed in range(2, 20):
        engine.store(tokens_of(16, seed), kv=kv_of(16, seed))
    assert engine.flush(20)
    for seed in range(1, 20):
        got = torch.zeros_like(KV)
        assert engine.retrieve(tokens_of(16, seed), kv=got).all() and torch.equal(got, kv_of(16, seed))
    assert count(engine, "dropped") == 0


def test_what_the_store_evicts_while_memory_has_it_is_written_when_memory_lets_go(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF | {"capacity": "1MiB", "write": "on_evict"})
    stored(engine, 1)
    assert engine._stack.memory.write_back_all(time.monotonic() + 20) and engine.flush(20)
    assert held(engine, 1) == 16
    tier = engine._stack.stored[0]
    tier.maintenance.delete(tier.ledger.release(2 * BLOB_BYTES))
    assert held(engine, 1) == 8 and held(engine, 1, tier="memory") == 16
    engine.close()
    assert len(Shelf.shelves["default"].blobs) == 4


def test_what_memory_holds_at_the_end_is_written(open_engine: Open) -> None:
    with open_engine(MEMORY, BEHIND) as engine:
        engine.store(TOKENS, kv=KV)
    assert open_engine(SHELF).retrieve(TOKENS, kv=torch.zeros_like(KV)).all()


def test_what_came_from_below_is_not_written_again(open_engine: Open) -> None:
    with open_engine(SHELF) as engine:
        stored(engine, *range(8))
    shelf = Shelf.shelves["default"]
    engine = open_engine({"type": "memory", "capacity": "32KiB"}, BEHIND)
    shelf = Shelf.shelves["default"]
    puts: list[str] = []
    shelf.before = lambda verb, key: puts.append(key) if verb == "put" and not key.startswith("spec") else None
    for seed in range(8):
        assert engine.retrieve(tokens_of(16, seed), kv=torch.zeros_like(KV)).all()
    engine.close()
    assert not puts


def test_a_tier_that_is_paused_does_not_keep_memory_from_letting_go(open_engine: Open) -> None:
    engine = open_engine({"type": "memory", "capacity": "32KiB"}, BEHIND | {"deadline": "100ms"})

    def fail(verb: str, key: str) -> None:
        if verb == "put":
            raise OSError(5, "Input/output error")

    Shelf.shelves["default"].before = fail
    for seed in range(20):
        engine.store(tokens_of(16, seed), kv=kv_of(16, seed))
    assert engine.lookup(tokens_of(16, 19), ["memory"]).tokens == 16
    assert count(engine, "dropped") > 0
