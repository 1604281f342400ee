"""Concurrent requests do common work once; cancelling one does not affect the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from core_support import CHUNK, SPEC, Gate, PlainConnector, Shelf, kv_of, matches, tokens_of

from kvloom import BackendError, Engine, Hit, Index, KVSpec, Registry
from kvloom.pipeline.key_locks import KeyLocks
from kvloom.runtime import SystemRuntime

MEMORY = {"type": "memory", "capacity": "1MiB"}
SHELF = {"type": "shelf", "deadline": "20s"}
Open = Callable[..., Engine]
TOKENS, KV = tokens_of(16), kv_of(16)


def in_threads(count: int, work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_loads_of_one_chunk_at_one_time_are_one_read(open_engine: Open, gate: Gate) -> None:
    with open_engine(SHELF) as engine:
        engine.store(TOKENS, kv=KV)
    engine = open_engine(MEMORY, SHELF)
    gets: list[str] = []

    def before(verb: str, key: str) -> None:
        if verb == "get":
            gets.append(key)
            gate(verb, key)

    Shelf.shelves["default"].before = before
    got = [torch.zeros_like(KV) for _ in range(6)]
    tasks = [engine.load(engine.segments(TOKENS), kv=kv) for kv in got]
    gate.reached(4)
    gate.open()
    for task, kv in zip(tasks, got, strict=True):
        assert task.result(20).all() and torch.equal(kv, KV)
    assert len(gets) == len(set(gets)) == 4
    engine._stack.memory.remove(engine._stack.memory.chunks())
    assert engine._stack.memory.used_bytes == 0, "no lease is left"


def test_one_who_cancels_does_not_cancel_for_the_others(open_engine: Open, gate: Gate) -> None:
    with open_engine(SHELF) as engine:
        engine.store(TOKENS, kv=KV)
    engine = open_engine(MEMORY, SHELF)
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb == "get" else None
    first, second = (engine.load(engine.segments(TOKENS), kv=torch.zeros_like(KV)) for _ in range(2))
    gate.reached(4)
    first.cancel()
    assert not first.result(20).any(), "at once, though the store still hangs"
    assert not second.done
    gate.open()
    assert second.result(20).all()
    assert engine.tiers["shelf"].abandoned_calls == 0


def test_stores_of_one_prompt_at_one_time_copy_it_once(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    engine = open_engine(MEMORY, SHELF)
    copied: list[int] = []
    read = PlainConnector.read

    def slow(self: PlainConnector, segments: object, chunks: object, **where: object) -> None:
        copied.extend(segment.start for segment in segments)  # type: ignore[attr-defined]
        time.sleep(0.05)
        return read(self, segments, chunks, **where)  # type: ignore[arg-type]

    monkeypatch.setattr(PlainConnector, "read", slow)

    def store() -> None:
        engine.store(TOKENS, kv=KV)
        assert engine.lookup(TOKENS, ["memory"]).tokens == 16, "there, whoever copied it"

    in_threads(6, store)
    assert sorted(copied) == [0, 4, 8, 12]


def test_a_copy_that_fails_is_done_by_the_one_who_waited(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(MEMORY)
    started, fail = threading.Event(), threading.Event()
    read = PlainConnector.read

    def first_fails(self: PlainConnector, segments: object, chunks: object, **where: object) -> None:
        if not started.is_set():
            started.set()
            fail.wait(20)
            raise RuntimeError("the device is gone")
        return read(self, segments, chunks, **where)  # type: ignore[arg-type]

    monkeypatch.setattr(PlainConnector, "read", first_fails)
    failing = engine.save(engine.segments(TOKENS), kv=KV)
    assert started.wait(20)
    waiting = engine.save(engine.segments(TOKENS), kv=KV)
    time.sleep(0.05)
    assert not waiting.done
    fail.set()
    with pytest.raises(RuntimeError, match="the device is gone"):
        failing.result(20)
    waiting.result(20)
    got = torch.zeros_like(KV)
    assert matches(got, KV, engine.retrieve(TOKENS, kv=got)) and got.any()
    assert engine._stack.memory.used_bytes == 4 * 4096, "what failed gave its memory back"


def test_waiting_for_a_claim_ends_in_time() -> None:
    locks = KeyLocks(SystemRuntime())
    keys = list(range(3))
    with locks.of(keys) as mine:  # type: ignore[arg-type]
        assert mine == set(keys)
        with locks.of(keys) as nothing:  # type: ignore[arg-type]
            assert nothing == set()
        assert not locks.wait(keys, time.monotonic() + 0.02)  # type: ignore[arg-type]
    assert locks.wait(keys, time.monotonic())  # type: ignore[arg-type]


# -- a frozen store costs a caller one deadline, then nothing ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("verbs", [("contains", "get", "put"), ("get",), ("contains",)], ids="+".join)
def test_a_frozen_store_costs_each_call_one_deadline_and_then_none(
    open_engine: Open, gate: Gate, verbs: tuple[str, ...]
) -> None:
    with open_engine(SHELF) as engine:
        engine.store(TOKENS, kv=KV)
    engine = open_engine(MEMORY, SHELF | {"deadline": "2s"})
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb in verbs else None
    slow = 0
    for _ in range(12):
        began = time.monotonic()
        assert not engine.retrieve(TOKENS, kv=torch.zeros_like(KV)).any()
        took = time.monotonic() - began
        assert took < 2 + 4, "not one for each of the four chunks"
        slow += took > 1.6
    assert 1 <= slow <= 6
    health = engine.health()
    (shelf,) = (tier for tier in health.tiers if tier.name == "shelf")
    assert not health.ok and shelf.state in ("paused", "stuck") and "deadline" in shelf.reason
    assert engine.lookup(TOKENS) == Hit(0, {}), "a paused tier has nothing"
    engine.store(tokens_of(16, 3), kv=kv_of(16, 3))
    assert engine.lookup(tokens_of(16, 3), ["memory"]).tokens == 16
    gate.open()
    until = time.monotonic() + 20
    while not engine.health().ok and time.monotonic() < until:
        engine.lookup(TOKENS)
        time.sleep(0.01)
    got = torch.zeros_like(KV)
    assert engine.retrieve(TOKENS, kv=got).all() and torch.equal(got, KV), "back"
    assert any(key.name == "tier_resumed" for key in engine.counters())


def test_a_store_that_cannot_be_written_still_gives_hits(open_engine: Open) -> None:
    with open_engine(SHELF) as engine:
        engine.store(TOKENS, kv=KV)
    engine = open_engine(MEMORY, SHELF)
    puts: list[str] = []

    def full(verb: str, key: str) -> None:
        if verb == "put":
            puts.append(key)
            raise OSError(28, "No space left on device")

    Shelf.shelves["default"].before = full
    for seed in range(8):
        engine.store(tokens_of(16, seed + 50), kv=kv_of(16, seed + 50))
        engine.flush(20)
    assert len(puts) < 8 * 4, "it is left alone after a while"
    (shelf,) = (tier for tier in engine.health().tiers if tier.name == "shelf")
    assert shelf.state == "read only" and shelf.retry_in_seconds is not None
    got = torch.zeros_like(KV)
    assert engine.retrieve(TOKENS, kv=got).all() and torch.equal(got, KV)


# -- an index --------------------------------------------------------------------------------------------------------


def ranked(rank: int) -> KVSpec:
    return KVSpec(model="tiny", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16", world_size=3, rank=rank)


def open_index(registry: Registry, *tiers: dict[str, object], spec: KVSpec = SPEC) -> Index:
    source = {"chunk_tokens": CHUNK, "connector": "plain", "tiers": list(tiers)}
    return Engine.open(source, spec, role="index", registry=registry)


def test_an_index_sees_what_engines_share_and_moves_nothing(open_engine: Open, registry: Registry) -> None:
    engine = open_engine(MEMORY, SHELF)
    engine.store(TOKENS, kv=KV)
    assert engine.flush(20)
    with open_index(registry, MEMORY, SHELF) as index:
        assert index.lookup(TOKENS) == Hit(16, {"shelf": 16})
        assert list(index.tiers) == ["shelf"] and index.health().ok
        assert index._stack.memory.pool.capacity == 0
        assert not isinstance(index, Engine) and not hasattr(index, "retrieve")
        engine.remove(TOKENS[:8])
        assert index.lookup(TOKENS) == Hit(0, {}), "it remembers nothing"
        assert index.find(index.segments(TOKENS)).tolist() == [False, False, True, True]
    with pytest.raises(BackendError, match="closed"):
        index.lookup(TOKENS)


def test_a_chunk_is_there_once_every_rank_has_stored_it(open_engine: Open, registry: Registry) -> None:
    with open_index(registry, SHELF, spec=ranked(1)) as index:
        for rank, length in ((0, 16), (2, 8), (1, 12)):
            assert index.lookup(TOKENS).tokens == 0
            with open_engine(SHELF, spec=ranked(rank)) as engine:
                engine.store(TOKENS[:length], kv=KV)
        assert index.lookup(TOKENS) == Hit(8, {"shelf": 8})


def test_an_index_does_not_count_what_has_expired(
    open_engine: Open, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(SHELF) as engine:
        engine.store(TOKENS, kv=KV)
    ahead = 0.0
    monkeypatch.setattr(SystemRuntime, "wall", staticmethod(lambda: time.time() + ahead))
    with open_index(registry, SHELF | {"ttl": "1h"}) as index:
        assert index.lookup(TOKENS).tokens == 16
        ahead = 4000.0
        assert index.lookup(TOKENS).tokens == 0


def test_a_sibling_is_closed_with_its_owner(open_engine: Open) -> None:
    owner = open_engine(MEMORY)
    sibling = owner.sibling(replace(SPEC, adapters=("one",)))
    sibling.store(TOKENS, kv=KV)
    owner.close()
    with pytest.raises(BackendError, match="closed"):
        sibling.lookup(TOKENS)


def test_an_index_needs_something_to_ask(registry: Registry) -> None:
    with pytest.raises(ValueError, match="tiers: an index needs a tier that processes share"):
        open_index(registry, MEMORY, {"type": "dict"})
    with pytest.raises(ValueError, match="role: expected 'engine' or 'index', got 'oracle'"):
        Engine.open({"tiers": [MEMORY]}, SPEC, role="oracle", registry=registry)  # type: ignore[call-overload]
