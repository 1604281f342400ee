"""Every chunk that is asked for and not given is counted once, with why."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from clock_support import Hang
from core_support import Gate, Shelf
from faults_support import DAMAGE, KV, MEMORY, SHELF, TOKENS, Open, chunk_names, filled, misses, retrieve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import DeadlineExceeded


@given(
    damage=st.lists(st.sampled_from([None, "gone", *DAMAGE]), min_size=4, max_size=4),
    verb=st.sampled_from(["retrieve", "load", "prefetch"]),
    memory=st.booleans(),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_not_given_is_missed(
    open_engine: Open, damage: list[str | None], verb: str, memory: bool
) -> None:  # fmt: skip
    Shelf.shelves.clear()
    shelf = filled(open_engine)
    with open_engine(*[MEMORY][: int(memory)], SHELF) as engine:
        for name, kind in zip(chunk_names(engine), damage, strict=True):
            if kind == "gone":
                del shelf._blobs[name]
            elif kind is not None:
                shelf._blobs[name] = DAMAGE[kind](shelf._blobs[name], b"x" * 5000)
        if verb == "retrieve":
            given = retrieve(engine)
        elif verb == "load":
            given = engine.load(engine.segments(TOKENS), kv=torch.zeros_like(KV)).result(20).tolist()
        else:
            given = engine.prefetch(TOKENS).result(20).tolist()
        assert sum(misses(engine).values()) == 4 - sum(given)
        assert "behind a miss" not in misses(engine) or verb == "retrieve"


def test_a_tier_that_is_late_or_left_alone_gave_no_answer(open_engine: Open, hang: Hang) -> None:
    filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    Shelf.shelves["default"].before = lambda verb, key: hang(verb, key) if verb == "get" else None
    for _ in range(4):
        assert retrieve(engine) == [False] * 4
    assert engine.health().tiers[1].state in ("paused", "stuck")
    assert misses(engine) == {"no answer": 4, "behind a miss": 12}


def test_what_was_cancelled_was_given_up(open_engine: Open, gate: Gate) -> None:
    filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb == "get" else None
    task = engine.load(engine.segments(TOKENS), kv=torch.zeros_like(KV))
    gate.reached()
    with pytest.raises(DeadlineExceeded):
        task.result(0.0)
    until = time.monotonic() + 20  # it is one miss for each chunk: wait for the last
    while sum(misses(engine).values()) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert misses(engine) == {"given up": 4}


def test_what_expired_is_said_to_have(open_engine: Open, clock: Callable[[float], None]) -> None:
    filled(open_engine)
    engine = open_engine(MEMORY, SHELF | {"ttl": "1h"})
    assert retrieve(engine) == [True] * 4
    engine = open_engine(SHELF | {"ttl": "1h"})
    clock(4000)
    assert retrieve(engine) == [False] * 4
    assert set(misses(engine)) <= {"expired", "in no tier", "behind a miss"} and sum(misses(engine).values()) == 4
