"""Observers with `sees_chunks` receive the chunks that enter or leave a tier; no other observer does, and no call
waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from core_support import CHUNK, CHUNK_BYTES, SPEC, Shelf, Watcher, kv_of, tokens_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import ChunkEvent, Engine, Event, Registry, int32_tokens
from kvloom.runtime import SystemRuntime
from kvloom.telemetry.events import CHUNK_EVENT_BYTES, CounterKey, EventBus

SOON = 30.0
MEMORY = {"type": "memory", "capacity": "1MiB"}
SHELF = {"type": "shelf", "deadline": "20s"}
Open = Callable[..., Engine]


def told(engine: Engine) -> Watcher:
    """The engine's watcher, which has been told of everything so far."""
    assert engine.flush(SOON) and engine._events.flush(SOON)
    return Watcher.made[-1]


def keys_of(engine: Engine, tokens: torch.Tensor, **salt: str) -> set[Any]:
    return {segment.key for segment in engine.segments(tokens, **salt)}


def test_what_is_stored_is_named_before_and_told_for_each_tier(open_engine: Open) -> None:
    engine, tokens = open_engine(MEMORY, SHELF, observers=["watcher"]), tokens_of(10)
    engine.store(tokens, kv=kv_of(10))
    watcher = told(engine)
    named, *stored = watcher.told
    assert (named.name, named.segments) == ("named", tuple(engine.segments(tokens)))
    assert np.frombuffer(named.tokens, "<i4").tolist() == tokens[:8].tolist()
    assert {(one.name, one.tier, one.in_memory) for one in stored} == {
        ("stored", "memory", True),
        ("stored", "shelf", False),
    }
    assert watcher.there["memory"] == watcher.there["shelf"] == keys_of(engine, tokens)


@pytest.mark.parametrize("verb", ["retrieve", "prefetch", "pin"])
def test_what_comes_up_is_named_and_told(open_engine: Open, verb: str) -> None:
    tokens = tokens_of(8)
    first = open_engine(SHELF)
    first.store(tokens, kv=kv_of(8))
    assert first.flush(SOON)
    engine = open_engine(MEMORY, SHELF, observers=["watcher"])
    engine.lookup(tokens)
    assert told(engine).told == []  # it moves nothing
    done = getattr(engine, verb)(tokens, **({"kv": kv_of(8)} if verb == "retrieve" else {}))
    if verb == "prefetch":
        done.result(SOON)
    watcher = told(engine)
    assert watcher.told[0].name == "named" and watcher.there["memory"] == keys_of(engine, tokens)


def test_what_is_removed_and_cleared_is_told(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF, observers=["watcher"])
    for salt, seed in (("", 1), ("x", 2), ("", 3)):
        engine.store(tokens_of(8, seed), kv=kv_of(8), salt=salt)
    engine.remove(tokens_of(8, 1))
    left = keys_of(engine, tokens_of(8, 2), salt="x") | keys_of(engine, tokens_of(8, 3))
    assert told(engine).there["memory"] == told(engine).there["shelf"] == left
    engine.clear("x")
    watcher = told(engine)
    assert watcher.there["memory"] == watcher.there["shelf"] == keys_of(engine, tokens_of(8, 3))
    assert watcher.told[-1].name == "cleared" and watcher.told[-1].prefix.startswith(f"{engine.fingerprint}/")
    engine.clear()
    watcher = told(engine)
    assert watcher.told[-1] == ChunkEvent("cleared", prefix=f"{engine.fingerprint}/")
    assert not watcher.there["memory"] and not watcher.there["shelf"]


def test_what_is_found_corrupt_is_told(open_engine: Open) -> None:
    engine, tokens = open_engine(SHELF, observers=["watcher"]), tokens_of(4)
    engine.store(tokens, kv=kv_of(4))
    assert engine.flush(SOON)
    blobs = Shelf.shelves["default"]._blobs
    for key, blob in list(blobs.items()):
        blobs[key] = bytes(blob[:-1]) + bytes([blob[-1] ^ 1])
    assert not engine.retrieve(tokens, kv=kv_of(4)).any()
    assert not told(engine).there["shelf"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_what_was_told_adds_up_to_what_is_there(open_engine: Open, seeds: list[int]) -> None:
    Shelf.shelves.clear()
    small = MEMORY | {"capacity": str(16 * CHUNK_BYTES)}
    bounded = SHELF | {"capacity": str(8192 * 6)}
    engine = open_engine(small, bounded, observers=["watcher"])
    for seed in seeds:
        engine.store(tokens_of(3 * CHUNK, seed), kv=kv_of(3 * CHUNK))
    watcher = told(engine)
    assert engine.memory is not None
    assert watcher.there["memory"] == set(engine.memory.chunks())
    assert {str(key) for key in watcher.there["shelf"]} == set(Shelf.shelves["default"].blobs)


def test_who_did_not_ask_is_not_told_and_nothing_is_made(open_engine: Open) -> None:
    engine = open_engine(MEMORY, observers=["blinkered"])
    engine.store(tokens_of(8), kv=kv_of(8))
    assert not engine._events.sees_chunks and told(engine).told == []
    both = open_engine(MEMORY, observers=["watcher", "blinkered"])
    both.store(tokens_of(8), kv=kv_of(8))
    assert told(both).told == [] and Watcher.made[-2].told


def test_an_index_makes_none_that_sees_chunks(registry: Registry) -> None:
    source = {"chunk_tokens": CHUNK, "connector": "plain", "tiers": [SHELF], "observers": ["watcher", "blinkered"]}
    with Engine.open(source, SPEC, role="index", registry=registry):
        assert [observer.type for observer in Watcher.made] == ["blinkered"]


def test_nobody_waits_for_who_sees_chunks_and_what_waits_is_bounded() -> None:
    class Stuck(Watcher):
        def on_event(self, event: Event) -> None:
            gate.wait(SOON)

    gate = threading.Event()
    bus = EventBus([Stuck()], SystemRuntime())
    bus.emit(Event("missed"))
    tokens = int32_tokens(torch.zeros(1 << 20, dtype=torch.int32)).tobytes()
    many = CHUNK_EVENT_BYTES // len(tokens) + 10
    for _ in range(many):
        bus.emit_chunks(ChunkEvent("named", tokens=tokens))
    lost = bus.counters()[CounterKey("observer_lost", "", "chunks")].count
    assert 10 <= lost <= 12 and bus._chunk_bytes <= CHUNK_EVENT_BYTES
    gate.set()
    assert bus.flush(SOON)
    assert len(Watcher.made[-1].told) == many - lost and bus._chunk_bytes == 0
    bus.close()


def test_what_raises_is_counted_and_the_next_is_told() -> None:
    class Raising(Watcher):
        def on_chunks(self, event: ChunkEvent) -> None:
            super().on_chunks(event)
            raise ValueError("no route")

    bus = EventBus([Raising(), Watcher()], SystemRuntime())
    bus.emit_chunks(ChunkEvent("cleared"))
    bus.emit_chunks(ChunkEvent("cleared"))
    assert bus.flush(SOON)
    assert [len(one.told) for one in Watcher.made[-2:]] == [2, 2]
    assert bus.counters()[CounterKey("observer_error", "", "watcher")].count == 2
    bus.close()
    bus.emit_chunks(ChunkEvent("cleared"))
    assert len(Watcher.made[-1].told) == 2
