"""Observers with `sees_requests` receive each request once, after it and its writes: steps, sources, the caller's
context."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_support import CHUNK, CHUNK_BYTES, SPEC, Gate, Shelf, Witness, kv_of, tokens_of

from kvloom import ConfigError, Engine, Registry, Request
from kvloom.runtime import SystemRuntime
from kvloom.telemetry import events
from kvloom.telemetry.events import QUEUE_REQUESTS, EventBus

SOON = 30.0
MEMORY = {"type": "memory", "capacity": "1MiB"}
SHELF = {"type": "shelf", "deadline": "20s"}
Open = Callable[..., Engine]


def told(engine: Engine) -> list[tuple[Request, object]]:
    assert engine.flush(SOON) and engine._events.flush(SOON)
    seen, Witness.made[-1].seen = Witness.made[-1].seen, []
    return seen


def steps(request: Request) -> dict[tuple[str, str, str], int]:
    return {(one.name, one.tier, one.codec): one.bytes for one in request.steps}


def test_a_store_says_what_each_tier_did_and_a_retrieve_where_it_came_from(open_engine: Open) -> None:
    engine, tokens, kv = open_engine(MEMORY, SHELF, observers=["witness"]), tokens_of(10), kv_of(10)
    engine.store(tokens, kv=kv)
    ((store, _),) = told(engine)
    segments = engine.segments(tokens)
    assert (store.verb, store.tokens, store.served_tokens, store.num_tokens) == ("store", 8, 8, 10)
    assert store.keys == tuple(segment.key for segment in segments) and store.ends == (4, 8)
    assert store.first == 0 and store.chunk_tokens == CHUNK and store.sources == {} and store.error == ""
    assert set(steps(store)) == {("copy", "", ""), ("encode", "shelf", "raw"), ("write", "shelf", "")}
    assert steps(store)["copy", "", ""] == steps(store)["encode", "shelf", "raw"] == 2 * CHUNK_BYTES
    assert [one.chunks for one in store.steps] == [2, 2, 2]
    assert all(store.began - 1 < one.began < store.began + SOON for one in store.steps)
    mask = torch.ones(10, dtype=torch.bool)
    mask[:4] = False
    engine.retrieve(tokens, mask, kv=torch.zeros_like(kv))
    ((retrieve, _),) = told(engine)
    assert (retrieve.verb, retrieve.tokens, retrieve.served_tokens, retrieve.first) == ("retrieve", 4, 4, 1)
    assert retrieve.sources == {"memory": 4} and set(steps(retrieve)) == {("copy", "", "")}


def test_what_comes_from_below_is_read_and_decoded_there(open_engine: Open) -> None:
    first = open_engine({**SHELF, "serializer": "signs"})
    first.store(tokens_of(8), kv=kv_of(8))
    assert first.flush(SOON)
    engine = open_engine(MEMORY, {**SHELF, "serializer": "signs"}, observers=["witness"])
    assert engine.lookup(tokens_of(12)).tokens == 8
    engine.prefetch(tokens_of(12)).result(SOON)
    (lookup, _), (prefetch, _) = told(engine)
    assert (lookup.verb, lookup.tokens, lookup.served_tokens, lookup.sources) == ("lookup", 12, 8, {"shelf": 8})
    assert (prefetch.verb, prefetch.tokens, prefetch.served_tokens, prefetch.sources) == (
        "prefetch",
        12,
        8,
        {"shelf": 8},
    )
    assert set(steps(prefetch)) == {("read", "shelf", ""), ("decode", "shelf", "signs")}
    assert steps(prefetch)["decode", "shelf", "signs"] == 2 * CHUNK_BYTES
    blobs = sum(-(-len(blob) // 1) for blob in Shelf.shelves["default"].blobs.values())
    assert steps(prefetch)["read", "shelf", ""] == blobs


@pytest.mark.parametrize("verb", ["load", "save", "pin", "retrieve_layer", "store_layer", "load_layers"])
def test_every_verb_is_told_once(open_engine: Open, verb: str) -> None:
    engine, tokens, kv = open_engine(MEMORY, SHELF, observers=["witness"]), tokens_of(8), kv_of(8)
    if verb not in ("save", "store_layer"):
        engine.store(tokens, kv=kv)
        told(engine)
    if verb in ("load", "save"):
        getattr(engine, verb)(engine.segments(tokens), kv=kv).result(SOON)
    elif verb == "pin":
        engine.pin(tokens)
    elif verb == "store_layer":
        with engine.store_layer(tokens, kv=kv) as storing:
            for layer in range(storing.num_layers):
                storing.layer(layer)
            storing.finish()
    else:
        given: Any = engine.segments(tokens) if verb == "load_layers" else tokens
        with getattr(engine, verb)(given, kv=torch.zeros_like(kv)) as loading:
            loading.result()
    ((request, _),) = told(engine)
    assert (request.verb, request.tokens, request.served_tokens, request.error) == (verb, 8, 8, "")
    copies = [one.bytes for one in request.steps if one.name == "copy"]
    assert copies == ([] if verb == "pin" else [2 * CHUNK_BYTES])
    assert request.sources == ({} if verb in ("save", "store_layer") else {"memory": 8})


def test_a_verb_that_raises_or_is_given_up_is_told_with_its_error(open_engine: Open) -> None:
    engine = open_engine(observers=["witness"])
    with pytest.raises(ValueError, match="kv"):
        engine.store(tokens_of(8), kv=torch.zeros(1))
    with engine.store_layer(tokens_of(8), kv=kv_of(8)):
        pass
    (store, _), (layers, _) = told(engine)
    assert (store.error, store.served_tokens) == ("ValueError", 0)
    assert (layers.verb, layers.served_tokens) == ("store_layer", 0)


def test_it_is_told_when_its_last_write_is_over_or_given_up(open_engine: Open, gate: Gate) -> None:
    engine = open_engine(MEMORY, SHELF | {"deadline": "200ms"}, observers=["witness"])
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb == "put" and key[:4] != "spec" else None
    engine.store(tokens_of(4), kv=kv_of(4))
    assert not Witness.made[-1].seen and engine._events.flush(SOON) and not Witness.made[-1].seen
    ((request, _),) = told(engine)  # past the deadline it is given up
    assert request.served_tokens == 4 and ("write", "shelf", "") not in steps(request)
    gate.open()


def test_the_caller_is_asked_on_its_own_thread_as_the_request_begins(open_engine: Open) -> None:
    engine, names = open_engine(MEMORY, observers=["witness"]), ["one", "two"]
    threads = [threading.Thread(target=lambda: engine.prefetch(tokens_of(4)).result(SOON), name=name) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(str(caller) for _, caller in told(engine)) == names


def test_nothing_is_made_of_requests_that_nobody_wants_to_see(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(MEMORY, SHELF, observers=["watcher"])
    monkeypatch.setattr(EventBus, "callers", lambda self: pytest.fail("a record was begun"))
    engine.store(tokens_of(4), kv=kv_of(4))
    assert engine.retrieve(tokens_of(4), kv=kv_of(4)).all()


def test_observers_that_raise_or_do_not_keep_up_hurt_nobody(open_engine: Open, gate: Gate) -> None:
    engine = open_engine(MEMORY, observers=["witness", "watcher"])
    witness = Witness.made[-1]
    witness.trouble = RuntimeError("no")
    engine.store(tokens_of(4), kv=kv_of(4))
    told(engine)
    assert any(key.name == "observer_error" and key.reason == "witness" for key in engine.counters())
    witness.trouble = None
    witness.before = lambda: gate("", "")
    for _ in range(QUEUE_REQUESTS + 5):
        engine.lookup(tokens_of(4))
    lost = {key.reason: sums.count for key, sums in engine.counters().items() if key.name == "observer_lost"}
    assert lost["requests"] in (4, 5)
    gate.open()


def test_requests_that_wait_have_a_bound_in_bytes(
    open_engine: Open, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(MEMORY, observers=["witness"])
    Witness.made[-1].before = lambda: gate("", "")
    monkeypatch.setattr(events, "REQUEST_BYTES", 100 * 256)
    for _ in range(20):
        engine.lookup(tokens_of(4 * 49))  # 49 keys
    lost = {key.reason: sums.count for key, sums in engine.counters().items() if key.name == "observer_lost"}
    assert lost["requests"] in (17, 18), "two fit, and one may be told of"
    gate.open()
    told(engine)
    assert engine._events._request_bytes == 0


def test_observers_watch_the_engine_as_long_as_it_is_there(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF, observers=["witness"], instance_id="mine")
    watched = Witness.made[-1].watched
    assert (watched.instance_id, watched.fingerprint, watched.spec) == ("mine", engine.fingerprint, engine.spec)
    assert [tier.name for tier in watched.health().tiers] == ["memory", "shelf"]
    engine.store(tokens_of(4), kv=kv_of(4))
    assert ("stored", "memory", "") in watched.counters()


def test_an_observer_that_cannot_watch_keeps_the_engine_from_opening(registry: Registry) -> None:
    before = set(threading.enumerate())
    observers = [{"type": "witness", "refuses": True}]
    config = {"chunk_tokens": CHUNK, "connector": "plain", "tiers": [MEMORY], "observers": observers}
    with pytest.raises(ConfigError, match=r"observers\.0: .*in use"):
        Engine.open(config, SPEC, registry=registry)
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not [name for name in left if "pages" not in name]


def test_an_index_is_watched_and_its_lookups_are_told(registry: Registry) -> None:
    config = {"chunk_tokens": CHUNK, "connector": "plain", "tiers": [SHELF], "observers": ["witness"]}
    with Engine.open(config, SPEC, role="index", registry=registry) as index:
        index.lookup(tokens_of(8))
        assert index._events.flush(SOON)
        assert [request.verb for request, _ in Witness.made[-1].seen] == ["lookup"]
        assert Witness.made[-1].watched.health().tiers


def test_a_bus_takes_no_request_after_its_end() -> None:
    bus = EventBus([], SystemRuntime())
    bus.close()
    bus.emit_request(None, [])  # type: ignore[arg-type]
    assert bus.flush(1.0)


def test_a_task_too_many_is_told_as_one_that_gave_nothing(
    open_engine: Open, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloom.engine.background.MOST_TASKS", 1)
    engine = open_engine(MEMORY, SHELF, observers=["witness"])
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb == "contains" else None
    first = engine.prefetch(tokens_of(4))
    engine.prefetch(tokens_of(8)).result(SOON)
    gate.open()
    first.result(SOON)
    assert sorted((request.tokens, request.served_tokens) for request, _ in told(engine)) == [(4, 0), (8, 0)]
