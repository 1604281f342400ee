"""A store of several servers, one of which does not answer: misses and lost writes for its keys, and for no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from core_support import CHUNK, Crate, Shelf, kv_of, tokens_of

from kvloom import Engine, PartDownError
from kvloom.tiers.stored.breaker import FAILURES

Open = Callable[..., Engine]
PROMPTS = 2 * FAILURES
SICK = range(FAILURES + 1)
"""Prompts whose chunk is on the server that does not answer."""


def names(engine: Engine, prompts: range) -> set[str]:
    return {str(engine.segments(tokens_of(CHUNK, prompt))[0].key) for prompt in prompts}


def hits(engine: Engine, prompts: range) -> list[int]:
    return [
        int(engine.retrieve(tokens_of(CHUNK, prompt), kv=torch.zeros_like(kv_of(CHUNK))).sum()) for prompt in prompts
    ]


def state(engine: Engine) -> str:
    return engine.health().tiers[-1].state


@pytest.mark.parametrize("store", [Shelf, Crate])
def test_reads_from_a_part_that_is_down_pause_nothing(open_engine: Open, store: type[Shelf]) -> None:
    engine = open_engine({"type": store.type})
    for prompt in range(PROMPTS):
        engine.store(tokens_of(CHUNK, prompt), kv=kv_of(CHUNK))
    assert engine.flush(60)
    sick = names(engine, SICK)

    def down(verb: str, key: str) -> None:
        if verb == "get" and key in sick:
            raise PartDownError("no answer")

    Shelf.shelves["default"].before = down
    well = range(SICK.stop, PROMPTS)
    assert hits(engine, SICK) == [0] * len(SICK) and state(engine) == "ok"
    assert hits(engine, well) == [CHUNK] * len(well)
    assert engine.counters()["missed", store.type, "no answer"].chunks == len(SICK)
    Shelf.shelves["default"].before = lambda verb, key: None
    assert hits(engine, SICK) == [CHUNK] * len(SICK), "they are asked for again"


@pytest.mark.parametrize("store", [Shelf, Crate])
def test_writes_to_a_part_that_is_down_pause_nothing(open_engine: Open, store: type[Shelf]) -> None:
    engine = open_engine({"type": store.type})
    sick, other = names(engine, SICK), OSError

    def down(verb: str, key: str) -> None:
        if verb == "put":
            raise PartDownError("no answer") if key in sick else other("full")

    Shelf.shelves["default"].before = down
    for prompt in SICK:
        engine.store(tokens_of(CHUNK, prompt), kv=kv_of(CHUNK))
        assert engine.flush(60)
    assert state(engine) == "ok" and not Shelf.shelves["default"].blobs
    for prompt in range(SICK.stop, SICK.stop + FAILURES):
        engine.store(tokens_of(CHUNK, prompt), kv=kv_of(CHUNK))
        assert engine.flush(60)
    assert state(engine) != "ok", "other errors count"


def test_a_failure_of_the_store_counts_also_behind_one_of_a_part(open_engine: Open) -> None:
    engine = open_engine({"type": "crate"})  # reports a batch from its end

    def down(verb: str, key: str) -> None:
        if verb == "put":
            raise OSError("full") if key in first else PartDownError("no answer")

    Shelf.shelves["default"].before = down
    for prompt in range(FAILURES):
        segments = engine.segments(tokens_of(2 * CHUNK, prompt))
        first = {str(segments[0].key)}
        engine.save(segments, kv=kv_of(2 * CHUNK)).result(60)
        assert engine.flush(60)
    assert state(engine) != "ok"
    assert any(len(batch) == 2 for batch in Crate.shelves["default"].puts)
