"""Storing layer by layer: what is kept; and of two that store one chunk at one time, one copies it and nobody waits."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from core_support import CHUNK, Gate, Shelf, tokens_of
from layers_support import (
    DEEP,
    KV,
    LAYERS,
    MEMORY,
    SHELF,
    TOKENS,
    Open,
    by_layers,
    chunks_in,
    deep_kv,
    right,
    settled,
    store_layers,
)

from kvloom import BackendError, Engine, KVSpec, Segment
from kvloom.memory import pages_of
from kvloom.pipeline.key_locks import LongKeyLocks
from kvloom.pipeline.layer_store import Storing
from kvloom.runtime import SystemRuntime

pytestmark = pytest.mark.usefixtures("ranges")
LAYOUTS = pytest.mark.parametrize("tiers", [(MEMORY,), (MEMORY, SHELF), (SHELF,)], ids=["memory", "both", "stored"])


# -- what is stored ----------------------------------------------------------------------------------------------------


def test_only_what_is_missing_is_copied(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    segments = engine.segments(TOKENS)
    engine.save([segments[0], segments[2]], kv=KV).result(20)
    read: list[tuple[int, list[Segment]]] = []
    read_layer = engine.connector.read_layer

    def spy(layer: int, some: Any, chunks: Any, **where: Any) -> None:
        read.append((layer, list(some)))
        read_layer(layer, some, chunks, **where)

    engine.connector.read_layer = spy  # type: ignore[method-assign]
    assert store_layers(engine, TOKENS, KV, reversed(range(LAYERS))) == 2 * CHUNK
    assert read == [(layer, [segments[1], segments[3]]) for layer in reversed(range(LAYERS))]
    read.clear()
    assert store_layers(engine, TOKENS, KV) == 0
    assert not read
    assert engine.flush(20)
    got, masks = by_layers(open_engine(SHELF, spec=DEEP))
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks)


def test_storing_reports_what_store_reports(open_engine: Open) -> None:
    totals = []
    for by_layer in (False, True):
        Shelf.shelves.clear()
        engine = open_engine(MEMORY, SHELF, spec=DEEP)
        store_layers(engine, TOKENS, KV) if by_layer else engine.store(TOKENS, kv=KV)
        assert engine.flush(20)
        totals.append({key: (t.count, t.chunks, t.tokens, t.bytes) for key, t in engine.counters().items()
                       if key.tier == "memory"})  # fmt: skip
        totals.append({key: (t.chunks, t.tokens, t.bytes) for key, t in engine.counters().items()})
    assert totals[0] == totals[2] and totals[1] == totals[3]


def test_a_layer_that_was_skipped_is_an_error_and_nothing_is_stored(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    with pytest.raises(ValueError, match=r"layer: 2 was never stored \(1 of 6 are lacking\)"):
        store_layers(engine, TOKENS, KV, [0, 1, 3, 4, 5])
    assert settled(engine) and engine.flush(20) and engine.lookup(TOKENS).tokens == 0
    store_layers(engine, TOKENS, KV)
    assert engine.lookup(TOKENS).tokens == 16


def test_leaving_without_finish_gives_the_memory_back(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    with engine.store_layer(TOKENS, kv=KV) as storing:
        for layer in range(LAYERS):
            storing.layer(layer)
        assert engine._stack.memory.pool.used_bytes
    assert settled(engine) and engine.lookup(TOKENS).tokens == 0
    for verb in (storing.finish, lambda: storing.layer(0)):
        with pytest.raises(BackendError, match="closed"):
            verb()
    left = engine.store_layer(TOKENS, kv=KV)
    engine.close()
    with pytest.raises(BackendError, match="closed"):
        left.layer(0)


def test_what_does_not_fit_is_dropped_and_said_so(open_engine: Open) -> None:
    engine = open_engine({"type": "memory", "capacity": "32KiB"}, SHELF, spec=DEEP)
    tokens, kv = tokens_of(40), deep_kv(40)
    with engine.store_layer(tokens, kv=kv) as storing:
        assert storing.mask.tolist() == [True] * 16 + [False] * 24, "half of the pool at most is held"
        other = tokens_of(8, 1)
        engine.store(other, kv=deep_kv(8, seed=1))
        assert engine.lookup(other, ["memory"]).tokens == 8, "others go on"
        for layer in range(LAYERS):
            storing.layer(layer)
        storing.finish()
    dropped = [totals for key, totals in engine.counters().items() if key.name == "dropped"]
    assert [one.chunks for one in dropped] == [6]
    assert engine.lookup(tokens).tokens == 16


@pytest.mark.parametrize("tiers", [(MEMORY,), (MEMORY, SHELF)], ids=["memory", "stored"])
@pytest.mark.parametrize("verb", ["remove", "clear"])
def test_a_removal_is_not_undone_by_a_store_under_way(
    open_engine: Open, tiers: tuple[dict[str, object], ...], verb: str
) -> None:
    engine = open_engine(*tiers, spec=DEEP)
    with engine.store_layer(TOKENS, kv=KV) as storing:
        for layer in range(LAYERS):
            storing.layer(layer)
        engine.remove(TOKENS[:8]) if verb == "remove" else engine.clear()
        storing.finish()
    assert engine.flush(20) and settled(engine)
    assert engine.find(engine.segments(TOKENS)).tolist() == [False, False] + [verb == "remove"] * 2
    store_layers(engine, TOKENS, KV)
    assert engine.lookup(TOKENS).tokens == 16, "and it can be stored again"


@pytest.mark.parametrize("tiers", [(MEMORY,), (MEMORY, SHELF)], ids=["memory", "stored"])
def test_a_removal_at_the_last_moment_is_not_undone(open_engine: Open, tiers: tuple[dict[str, object], ...]) -> None:
    engine = open_engine(*tiers, spec=DEEP)
    insert = engine._stack.storer.insert

    def remove_before(*args: Any, **kwargs: Any) -> None:
        engine.remove(TOKENS[:8])
        insert(*args, **kwargs)

    engine._stack.storer.insert = remove_before  # type: ignore[method-assign]
    store_layers(engine, TOKENS, KV)
    assert engine.flush(20) and settled(engine)
    assert engine.find(engine.segments(TOKENS)).tolist() == [False, False, True, True]


# -- two at one time ---------------------------------------------------------------------------------------------------


def spy_on_copies(engine: Engine) -> list[tuple[int, int]]:
    """The layer and the first token of every copy out of the engine's KV, from now on."""
    copies: list[tuple[int, int]] = []
    read_layer, read = engine.connector.read_layer, engine.connector.read

    def by_layer(layer: int, segments: Any, chunks: Any, **where: Any) -> Any:
        copies.extend((layer, segment.start) for segment in segments)
        return read_layer(layer, segments, chunks, **where)

    def whole(segments: Any, chunks: Any, **where: Any) -> Any:
        copies.extend((-1, segment.start) for segment in segments)
        return read(segments, chunks, **where)

    engine.connector.read_layer, engine.connector.read = by_layer, whole  # type: ignore[method-assign]
    return copies


def puts_of(shelf: Shelf) -> list[str]:
    puts: list[str] = []
    shelf.before = lambda verb, key: puts.append(key) if verb == "put" and "/" in key[5:] else None
    return puts


def all_layers(*storings: Storing) -> None:
    for layer in range(LAYERS):
        for storing in storings:
            storing.layer(layer)


def dropped(engine: Engine) -> int:
    return sum(totals.chunks for key, totals in engine.counters().items() if key.name == "dropped")


@LAYOUTS
def test_the_second_leaves_out_what_the_first_is_storing(
    open_engine: Open, tiers: tuple[dict[str, object], ...]
) -> None:
    engine = open_engine(*tiers, spec=DEEP)
    copies = spy_on_copies(engine)
    with engine.store_layer(TOKENS[:8], kv=KV) as first, engine.store_layer(TOKENS, kv=KV) as second:
        assert first.mask.tolist() == [True] * 8
        assert second.mask.tolist() == [False] * 8 + [True] * 8
        with engine.store_layer(TOKENS, kv=KV) as third:
            assert not third.mask.any()
            all_layers(first, second, third)
            third.finish()
        second.finish()
        first.finish()
    assert not engine._stack.storer._by_layer._holders
    assert sorted(copies) == [(layer, start) for layer in range(LAYERS) for start in (0, 4, 8, 12)], "each once"
    assert engine.flush(20) and settled(engine) and dropped(engine) == 0
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks)
    with engine.store_layer(TOKENS[:4], kv=KV) as again:
        assert not again.mask.any(), "and it is there"


@pytest.mark.parametrize("end", ["close", "a layer is lacking", "engine"])
def test_what_the_first_gives_up_is_free_again_and_counted(open_engine: Open, end: str) -> None:
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    first = engine.store_layer(TOKENS, kv=KV)
    with engine.store_layer(TOKENS[:8], kv=KV) as second:
        assert not second.mask.any()
    if end == "engine":
        engine.close()
        assert dropped(engine) == 2
        return
    if end == "close":
        all_layers(first)
        first.close()
    else:
        with pytest.raises(ValueError, match="was never stored"):
            first.finish()
    assert dropped(engine) == 2, "the two that the second had left to the first"
    assert engine.lookup(TOKENS).tokens == 0
    store_layers(engine, TOKENS, KV)
    assert engine.lookup(TOKENS).tokens == 16 and settled(engine)
    assert dropped(engine) == 2


def test_what_nobody_else_wanted_is_given_up_without_a_word(open_engine: Open) -> None:
    engine = open_engine(MEMORY, spec=DEEP)
    engine.store_layer(TOKENS, kv=KV).close()
    assert dropped(engine) == 0


@LAYOUTS
def test_a_whole_store_does_not_wait_for_a_forward_pass(
    open_engine: Open, tiers: tuple[dict[str, object], ...]
) -> None:
    """It copies what is being stored by layers, and the other finds it there at its end and writes nothing."""
    engine = open_engine(*tiers, spec=DEEP)
    puts = puts_of(Shelf.shelves["default"]) if SHELF in tiers else []
    with engine.store_layer(TOKENS, kv=KV) as storing:
        storing.layer(0)
        began = time.monotonic()
        engine.store(TOKENS[:8], kv=KV)
        assert time.monotonic() - began < 10, "the deadline is 20 s"
        assert engine.flush(20)
        assert engine.lookup(TOKENS).tokens == 8
        before = len(puts)
        for layer in range(1, LAYERS):
            storing.layer(layer)
        storing.finish()
    assert engine.flush(20) and settled(engine)
    assert engine.lookup(TOKENS).tokens == 16
    kept = [t.chunks for key, t in engine.counters().items() if (key.name, key.tier) == ("stored", "memory")]
    assert sum(kept) == (4 if MEMORY in tiers else 0), "and kept once"
    if SHELF in tiers:
        assert (before, len(puts)) == (2, 4), "each blob is written once"
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks)


def test_what_was_stored_after_a_removal_is_not_taken_back_by_a_storing_from_before_it(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    with engine.store_layer(TOKENS, kv=KV) as storing:
        all_layers(storing)
        engine.remove(TOKENS)
        engine.store(TOKENS[:8], kv=KV)
        assert engine.flush(20)
        storing.finish()
    assert engine.flush(20) and settled(engine)
    assert engine.find(engine.segments(TOKENS)).tolist() == [True, True, False, False]
    assert engine.lookup(TOKENS, ["shelf"]).tokens == 8


def test_what_a_whole_store_is_copying_is_left_to_it(open_engine: Open, gate: Gate) -> None:
    engine = open_engine(MEMORY, spec=DEEP)
    read = engine.connector.read

    def slow(segments: Any, chunks: Any, **where: Any) -> Any:
        gate("read", "")
        return read(segments, chunks, **where)

    engine.connector.read = slow  # type: ignore[method-assign]
    saving = engine.save(engine.segments(TOKENS[:8]), kv=KV)
    gate.reached()
    with engine.store_layer(TOKENS, kv=KV) as storing:
        assert storing.mask.tolist() == [False] * 8 + [True] * 8
        gate.open()
        saving.result(20)
        all_layers(storing)
        storing.finish()
    assert engine.lookup(TOKENS).tokens == 16 and settled(engine)


def test_a_claim_is_given_up_with_what_is_stored_already_or_has_no_room(open_engine: Open) -> None:
    tokens, kv = tokens_of(40), deep_kv(40)
    engine = open_engine({"type": "memory", "capacity": "32KiB"}, SHELF, spec=DEEP)
    engine.store(tokens[:4], kv=kv)
    with engine.store_layer(tokens, kv=kv) as first:
        assert first.mask.tolist() == [False] * 4 + [True] * 16 + [False] * 20
        assert set(engine._stack.storer._by_layer._holders) == {s.key for s in engine.segments(tokens)[1:5]}
    assert not engine._stack.storer._by_layer._holders


def test_a_claim_of_one_who_was_forgotten_ends() -> None:
    now = 100.0
    runtime = SystemRuntime()
    runtime.now = lambda: now  # type: ignore[method-assign]
    locks = LongKeyLocks(runtime, 5.0)
    first = locks.take(["a", "b"])  # type: ignore[list-item]
    now = 104.0
    assert locks.take(["a"]).keys == set()  # type: ignore[list-item]
    locks.go_on(first)
    now = 108.0
    assert locks.take(["a"]).keys == set(), "it went on"  # type: ignore[list-item]
    now = 109.5
    second = locks.take(["a"])  # type: ignore[list-item]
    assert second.keys == {"a"}
    assert locks.give(first) == {"a"}, "others had left it to the first"
    assert locks.take(["a", "b"]).keys == {"b"}, "what the second has now is not given back by the first"  # type: ignore[list-item,comparison-overlap]


def test_layers_are_stored_while_the_claim_lasts(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass longer than the deadline keeps its claims as long as it goes on."""
    ahead = 0.0
    monkeypatch.setattr(SystemRuntime, "now", staticmethod(lambda: time.monotonic() + ahead))
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    with engine.store_layer(TOKENS, kv=KV) as first:
        for layer in range(LAYERS):
            first.layer(layer)
            ahead += 15
            with engine.store_layer(TOKENS, kv=KV) as second:
                assert not second.mask.any()
        ahead += 6
        with engine.store_layer(TOKENS, kv=KV) as second:
            assert second.mask.all(), "nothing happened for longer than the deadline"
            all_layers(second)
            second.finish()
        first.finish()
    assert torch.equal(by_layers(engine)[0], KV) and settled(engine)


def test_memory_that_is_rounded_up_is_given_back_as_it_was_counted(open_engine: Open) -> None:
    deep = KVSpec(model="deep", num_layers=66, num_kv_heads=2, head_size=2048, dtype="bfloat16")
    engine = open_engine({"type": "memory", "capacity": "256MiB"}, spec=deep)
    pool = engine._stack.memory.pool
    kv = torch.zeros(deep.blob_shape(16), dtype=deep.torch_dtype)
    nbytes = kv[:, :, :CHUNK].nbytes
    assert pool.taken_by(nbytes) > pages_of(nbytes), "too small to be rounded up"
    for _ in range(3):
        with engine.store_layer(TOKENS, kv=kv) as storing:
            assert storing.mask.all()
            assert pool.staged_bytes > 0
        assert pool.staged_bytes == 0


def test_a_forgotten_storing_does_not_use_up_what_may_be_filled_by_layers(open_engine: Open) -> None:
    engine = open_engine(MEMORY, spec=DEEP)
    storing = engine.store_layer(TOKENS, kv=KV)
    assert storing.mask.all()
    del storing
    gc.collect()
    with engine.store_layer(TOKENS + 1, kv=KV) as storing:
        assert storing.mask.all()
    pool = engine._stack.memory.pool
    assert pool.staged_bytes == 0
    assert pool.leaked == len(engine.segments(TOKENS))
    pool.leaked = 0  # it was told of: the fixture need not
