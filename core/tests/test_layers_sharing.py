"""Loads of one chunk at one time, by layers or whole: each byte is read once, and nobody depends on who goes on."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_support import Gate, Shelf, tokens_of
from layers_support import (
    DEEP,
    KV,
    LAYERS,
    MEMORY,
    SHELF,
    STEP,
    TOKENS,
    Open,
    Ranges,
    by_layers,
    chunks_in,
    count,
    deep_kv,
    fill,
    finish,
    gated,
    right,
    settled,
    slow_writes,
    until,
)

from kvloom import Engine, envelope

pytestmark = pytest.mark.usefixtures("ranges")
BLOB = envelope.ALIGN_BYTES + 2 * LAYERS * STEP
WITH_MEMORY = pytest.mark.parametrize("memory", [(MEMORY,), ()], ids=["memory", "stored only"])
Reads = Counter[tuple[str, int]]


@pytest.fixture
def reads(ranges: Ranges, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Counts the reads of each byte of each blob among reads that begin a layer, and the bytes of all reads."""
    seen: Reads = Counter()
    lock = threading.Lock()
    get_range, get = Shelf.get_range, Shelf.get

    def note(key: str, start: int, length: int) -> None:
        with lock:
            seen["bytes", 0] += length
            for at in range(start, start + length, STEP):
                seen[key, at] += 1

    def counted_range(self: Shelf, key: str, offset: int, into: memoryview) -> bool:
        done = get_range(self, key, offset, into)
        note(key, offset, len(into) if done else 0)
        return done

    def counted(self: Shelf, key: str) -> Any:
        blob = get(self, key)
        note(key, 0, len(blob or b""))
        return blob

    monkeypatch.setattr(Shelf, "get_range", counted_range)
    monkeypatch.setattr(Shelf, "get", counted)
    return seen


def once(reads: Reads, blobs: int = 4) -> bool:
    """Every byte of so many blobs, and none twice."""
    return reads["bytes", 0] == blobs * BLOB and all(n == 1 for (key, _), n in reads.items() if key != "bytes")


def shared(engine: Engine) -> bool:
    """Two have a share in every chunk on its way."""
    reads = tuple(engine.tiers["shelf"].loads.inflight._open.values())
    return len(reads) == 4 and all(read.shares == 2 for read in reads)


# -- two by layers -----------------------------------------------------------------------------------------------------


@WITH_MEMORY
@pytest.mark.parametrize("layer", [-1, 0, 1, 4])
def test_two_loads_by_layers_read_everything_once(
    open_engine: Open, ranges: Ranges, gate: Gate, reads: Reads, memory: tuple[dict[str, object], ...], layer: int
) -> None:
    """The second begins when the first is at `layer`, and gets what the first has read already."""
    fill(open_engine)
    engine = open_engine(*memory, SHELF, spec=DEEP)
    gated(ranges, gate, layer)
    first, second = torch.zeros_like(KV), torch.zeros_like(KV)
    with engine.retrieve_layer(TOKENS, kv=first) as one:
        until(lambda: gate.waiting)
        with engine.retrieve_layer(TOKENS, kv=second) as two:
            if layer > 0:
                assert two.wait(layer - 1).all(), "it does not wait for the first to end"
                assert torch.equal(second[:, :layer], KV[:, :layer])
            until(lambda: shared(engine))  # else, without a memory tier, the first may be through before it begins
            gate.open()
            finish(two, second)
        finish(one, first)
    assert settled(engine) and once(reads)
    assert count(engine, "tier_error") == count(engine, "missed") == 0
    assert sum(t.chunks for key, t in engine.counters().items() if key.name == "retrieved" and key.tier) == 4


@pytest.mark.parametrize("who", ["first", "second"])
def test_one_who_gives_up_takes_nothing_from_the_other(
    open_engine: Open, ranges: Ranges, gate: Gate, reads: Reads, who: str
) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    gated(ranges, gate, 3)
    kv = [torch.zeros_like(KV), torch.zeros_like(KV)]
    loadings = [engine.retrieve_layer(TOKENS, kv=one) for one in kv]
    for loading in loadings:
        assert loading.wait(2).all()
    until(lambda: gate.waiting >= 4)
    leaving = 0 if who == "first" else 1
    loadings[leaving].close()
    untouched = kv[leaving].clone()
    gate.open()
    finish(loadings[1 - leaving], kv[1 - leaving])
    loadings[1 - leaving].close()
    assert settled(engine) and once(reads) and torch.equal(kv[leaving], untouched)
    assert not any(tier.abandoned_calls for tier in engine.tiers.values() if tier.name == "shelf")  # type: ignore[attr-defined]


def test_what_all_give_up_is_given_back(open_engine: Open, ranges: Ranges, gate: Gate) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    gated(ranges, gate, 3)
    loadings = [engine.retrieve_layer(TOKENS, kv=torch.zeros_like(KV)) for _ in range(3)]
    for loading in loadings:
        assert loading.wait(2).all()
    for loading in loadings:
        loading.close()
    assert not engine._stack.stored[0].loads.inflight._open
    gate.open()
    assert settled(engine) and not len(engine._stack.memory)
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks)


def test_one_who_writes_slowly_keeps_what_it_reads(open_engine: Open, gate: Gate, reads: Reads) -> None:
    """The first has the chunk complete, in memory and evicted again, while the second is still at layer 3."""
    fill(open_engine)
    engine = open_engine({"type": "memory", "capacity": "48KiB"}, SHELF, spec=DEEP)
    first, second = torch.zeros_like(KV), torch.zeros_like(KV)
    write_layer = engine.connector.write_layer

    def slow(number: int, segments: Any, chunks: Any, **where: Any) -> None:
        if number == 3 and where["kv"] is second:
            gate("write", "")
        write_layer(number, segments, chunks, **where)

    engine.connector.write_layer = slow  # type: ignore[method-assign]
    with engine.retrieve_layer(TOKENS, kv=second) as two:
        assert two.wait(2).all()
        with engine.retrieve_layer(TOKENS, kv=first) as one:
            finish(one, first)
        for seed in range(1, 12):
            engine.store(tokens_of(16, seed), kv=deep_kv(16, seed=seed))
        gate.open()
        finish(two, second)
    assert settled(engine) and engine.flush(20)


# -- one by layers, one whole ------------------------------------------------------------------------------------------


def whole_verb(engine: Engine, verb: str, kv: torch.Tensor) -> Callable[[], bool]:
    """Begins to bring TOKENS up whole; gives what waits for it and says whether all came."""
    if verb == "prefetch":
        task = engine.prefetch(TOKENS)
        return lambda: bool(task.result(20).all())
    if verb == "load":
        task = engine.load(engine.segments(TOKENS), kv=kv)
        return lambda: bool(task.result(20).all()) and torch.equal(kv, KV)
    outcome: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outcome.append(engine.retrieve(TOKENS, kv=kv)))
    thread.start()

    def wait() -> bool:
        thread.join(20)
        return bool(outcome) and bool(outcome[0].all()) and torch.equal(kv, KV)

    return wait


VERBS = pytest.mark.parametrize("verb", ["retrieve", "prefetch", "load"])


@VERBS
@WITH_MEMORY
@pytest.mark.parametrize("layer", [-1, 0, 1, 4])
def test_a_whole_load_shares_what_is_arriving_by_layers(
    open_engine: Open, ranges: Ranges, gate: Gate, reads: Reads, memory: tuple[dict[str, object], ...], verb: str,
    layer: int,
) -> None:  # fmt: skip
    fill(open_engine)
    engine = open_engine(*memory, SHELF, spec=DEEP)
    gated(ranges, gate, layer)
    got, other = torch.zeros_like(KV), torch.zeros_like(KV)
    with engine.retrieve_layer(TOKENS, kv=got) as loading:
        until(lambda: gate.waiting == 4)
        wait = whole_verb(engine, verb, other)
        arriving = engine._stack.stored[0].loads.inflight._open
        until(lambda: [read.hurried for read in tuple(arriving.values())] == [True] * 4)
        gate.open()
        assert wait()
        finish(loading, got)
    assert settled(engine) and once(reads) and count(engine, "missed") == count(engine, "tier_error") == 0


def test_a_whole_load_does_not_depend_on_the_one_by_layers(open_engine: Open, gate: Gate, reads: Reads) -> None:
    """Whoever loads by layers is stuck in its connector; whoever wants the chunk whole reads the rest, and goes."""
    tokens, kv = tokens_of(160), deep_kv(160)
    fill(open_engine, tokens=tokens, kv=kv)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    slow_writes(engine, gate, layer=1)
    got, other = torch.zeros_like(kv), torch.zeros_like(kv)
    with engine.retrieve_layer(tokens, kv=got) as loading:
        assert loading.wait(0).all()
        assert engine.retrieve(tokens, kv=other).all() and torch.equal(other, kv)
        gate.open()
        masks = [mask for _, mask in loading]
        assert chunks_in(masks) == [40] * LAYERS and right(got, kv, masks)
    assert settled(engine) and once(reads, 40)


@VERBS
@WITH_MEMORY
def test_a_load_by_layers_shares_what_is_being_read_whole(
    open_engine: Open, gate: Gate, reads: Reads, memory: tuple[dict[str, object], ...], verb: str
) -> None:
    fill(open_engine)
    engine = open_engine(*memory, SHELF, spec=DEEP)
    Shelf.shelves["default"].before = lambda name, key: gate(name, key) if name == "get" else None
    got, other = torch.zeros_like(KV), torch.zeros_like(KV)
    wait = whole_verb(engine, verb, other)
    until(lambda: gate.waiting == 4)
    with engine.retrieve_layer(TOKENS, kv=got) as loading:
        until(lambda: all(f.shares == 2 for f in tuple(engine._stack.stored[0].loads.inflight._open.values())))
        gate.open()
        assert wait()
        finish(loading, got)
    assert settled(engine) and once(reads) and count(engine, "missed") == count(engine, "tier_error") == 0


def test_what_another_read_in_vain_is_read_by_layers_after_all(
    open_engine: Open, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)

    def fail(verb: str, key: str) -> None:
        if verb == "get":
            gate(verb, key)
            raise OSError(5, "Input/output error")

    Shelf.shelves["default"].before = fail
    task = engine.prefetch(TOKENS)
    until(lambda: gate.waiting == 4)
    got = torch.zeros_like(KV)
    with engine.retrieve_layer(TOKENS, kv=got) as loading:
        until(lambda: all(f.shares == 2 for f in tuple(engine._stack.stored[0].loads.inflight._open.values())))
        monkeypatch.setattr("kvloom.tiers.stored.breaker.Breaker.failed", lambda self, verb: False)
        gate.open()
        finish(loading, got)
    assert not task.result(20).any() and settled(engine)


@pytest.mark.parametrize("capacity", ["32KiB", "36KiB"], ids=["no room to wait", "room to wait"])
def test_nobody_waits_for_a_read_that_waits_for_what_he_holds(open_engine: Open, gate: Gate, capacity: str) -> None:
    """Most of the prompt fills memory, and is leased; the next chunk is being loaded whole, and has no room."""
    tokens, kv = tokens_of(40), deep_kv(40)
    fill(open_engine, tokens=tokens, kv=kv)
    engine = open_engine({"type": "memory", "capacity": capacity}, SHELF, spec=DEEP)
    engine.store(tokens[:28], kv=kv)
    assert engine.flush(20) and engine.lookup(tokens, ["memory"]).tokens == 28
    Shelf.shelves["default"].before = lambda name, key: gate(name, key) if name == "get" else None
    got = torch.zeros_like(kv)
    task = engine.load(engine.segments(tokens)[7:8], kv=torch.zeros_like(kv))
    until(lambda: gate.waiting)
    began = time.monotonic()
    with engine.retrieve_layer(tokens, kv=got) as loading:
        if capacity == "36KiB":
            until(lambda: next(iter(engine._stack.stored[0].loads.inflight._open.values())).shares == 2)
        gate.open()
        masks = [mask for _, mask in loading]
        assert chunks_in(masks) == [10] * LAYERS and right(got, kv, masks)
    assert time.monotonic() - began < 10, "the deadline is 20 s"
    assert task.result(20).all()
    assert settled(engine)


@pytest.mark.parametrize("verb", ["by layers", "whole"])
def test_what_came_to_memory_a_moment_ago_is_not_read_again(open_engine: Open, reads: Reads, verb: str) -> None:
    """It was not there when this load looked, and is no longer on its way when it comes to ask for it."""
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    tier, came = engine._stack.stored[0], False
    at = tier.loads.inflight
    name = "join" if verb == "by layers" else "begin_or_join"
    ask = getattr(at, name)

    def ask_late(*args: Any, **more: Any) -> Any:
        nonlocal came
        if not came:
            came = True
            assert engine.retrieve(TOKENS, kv=torch.zeros_like(KV)).all()
        return ask(*args, **more)

    setattr(at, name, ask_late)
    got = torch.zeros_like(KV)
    if verb == "by layers":
        with engine.retrieve_layer(TOKENS, kv=got) as loading:
            finish(loading, got)
    else:
        assert engine.retrieve(TOKENS, kv=got).all() and torch.equal(got, KV)
    assert came and settled(engine) and once(reads) and not tier.loads.inflight._open
