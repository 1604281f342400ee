"""Loads of one chunk at one time, by layers or whole: each byte is read once, and nobody depends on who goes on."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from random import Random
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
    STEP,
    TOKENS,
    Open,
    Ranges,
    by_layers,
    chunks_in,
    count,
    damage,
    deep_kv,
    fill,
    layer_at,
    names_of,
    right,
    settled,
    slow_writes,
)  # fmt: skip

from kvloom import Engine, envelope
from kvloom.layers import Loading

pytestmark = pytest.mark.usefixtures("ranges")
BLOB = envelope.ALIGN_BYTES + 2 * LAYERS * STEP
WITH_MEMORY = pytest.mark.parametrize("memory", [(MEMORY,), ()], ids=["memory", "stored only"])
Reads = Counter[tuple[str, int]]


@pytest.fixture
def reads(ranges: Ranges, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """How often each byte of each blob was read of those that begin a layer, and how many bytes were in all."""
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


def gated(ranges: Ranges, gate: Gate, layer: int) -> None:
    """Nobody reads `layer`, nor what lies behind it, before the gate is open."""
    ranges.before = lambda key, offset: gate("range", key) if layer_at(offset) >= layer else None


def until(seen: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.001)


def finish(loading: Loading, got: torch.Tensor, want: torch.Tensor = KV, chunks: int = 4) -> None:
    masks = [mask for _, mask in loading]
    assert chunks_in(masks) == [chunks] * LAYERS and right(got, want, masks)


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
    assert not engine._stack.stored[0].loads.arrivals._open
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
        arriving = engine._stack.stored[0].loads.arrivals._open
        until(lambda: [arrival.hurried for arrival in tuple(arriving.values())] == [True] * 4)
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
        until(lambda: all(f.shares == 2 for f in tuple(engine._stack.stored[0].loads.flights._open.values())))
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
        until(lambda: all(f.shares == 2 for f in tuple(engine._stack.stored[0].loads.flights._open.values())))
        monkeypatch.setattr("kvloom.tiers.breaker.Breaker.failed", lambda self, verb: False)
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
            until(lambda: next(iter(engine._stack.stored[0].loads.flights._open.values())).shares == 2)
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
    at = tier.loads.arrivals if verb == "by layers" else tier.loads.flights
    name = "join" if verb == "by layers" else "board"
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
    assert came and settled(engine) and once(reads) and not tier.loads.arrivals._open


# -- when it goes wrong ------------------------------------------------------------------------------------------------


def test_a_damaged_layer_is_nobodys(open_engine: Open, ranges: Ranges, gate: Gate) -> None:
    shelf = fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    damage(shelf, names_of(engine)[1], layer=3)
    gated(ranges, gate, 0)
    kv = [torch.zeros_like(KV) for _ in range(3)]
    other = torch.zeros_like(KV)
    loadings = [engine.retrieve_layer(TOKENS, kv=one) for one in kv]
    until(lambda: gate.waiting >= 4)
    task = engine.load(engine.segments(TOKENS), kv=other)
    gate.open()
    for loading, got in zip(loadings, kv, strict=True):
        masks = [mask for _, mask in loading]
        # Whoever comes late finds it gone, or begins with what is known to be damaged.
        assert chunks_in(masks)[3:] == [1] * 3 and right(got, KV, masks)
        loading.close()
    assert task.result(20).tolist() == [True, False, True, True]
    assert torch.equal(other[:, :, :4], KV[:, :, :4]) and not other[:, :, 4:8].any()
    assert settled(engine) and count(engine, "corrupt") == 1
    assert not engine._stack.stored[0].loads.arrivals._open


def test_a_whole_load_reads_again_what_arrived_badly(open_engine: Open, ranges: Ranges, gate: Gate) -> None:
    """Only those who read ranges see the damage."""
    shelf = fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    name = names_of(engine)[1]
    good = shelf._blobs[name]

    def flicker(key: str, offset: int) -> None:
        if layer_at(offset) >= 3:
            gate("range", key)
            if key == name:
                damage(shelf, name, layer=3)

    def mend(verb: str, key: str) -> None:
        if verb == "get" and key == name:
            shelf._blobs[name] = good

    ranges.before, Shelf.shelves["default"].before = flicker, mend
    got, other = torch.zeros_like(KV), torch.zeros_like(KV)
    with engine.retrieve_layer(TOKENS, kv=got) as loading:
        assert loading.wait(2).all()
        task = engine.load(engine.segments(TOKENS), kv=other)
        until(lambda: any(one.hurried for one in tuple(engine._stack.stored[0].loads.arrivals._open.values())))
        gate.open()
        assert task.result(20).all() and torch.equal(other, KV)
        finish(loading, got)
    assert settled(engine) and count(engine, "corrupt") == 0


def test_all_who_share_a_call_that_hangs_give_up_in_time(open_engine: Open, ranges: Ranges, gate: Gate) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF | {"deadline": "1s"}, spec=DEEP)
    bad = names_of(engine)[2]
    ranges.before = lambda key, offset: gate("range", key) if key == bad and layer_at(offset) >= 3 else None
    kv = [torch.zeros_like(KV) for _ in range(2)]
    began = time.monotonic()
    loadings = [engine.retrieve_layer(TOKENS, kv=one) for one in kv]
    for loading, got in zip(loadings, kv, strict=True):
        masks = [mask for _, mask in loading]
        assert chunks_in(masks) == [4, 4, 4, 2, 2, 2] and right(got, KV, masks)
        loading.close()
    assert time.monotonic() - began < 10
    assert engine.retrieve(TOKENS, kv=torch.zeros_like(KV)).all(), "others begin anew"
    before = [one.clone() for one in kv]
    gate.open()
    assert settled(engine) and all(torch.equal(a, b) for a, b in zip(kv, before, strict=True))


def test_what_came_before_a_removal_is_not_given_to_who_comes_after(
    open_engine: Open, ranges: Ranges, gate: Gate
) -> None:
    """What is stored under the key after the removal is told apart here; keys of real KV would be other ones."""
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    slow = torch.zeros_like(KV)
    slow_writes(engine, gate, layer=3)
    with engine.retrieve_layer(TOKENS, kv=slow) as loading:
        assert loading.wait(2).all()
        engine.remove(TOKENS)
        new = deep_kv(16, seed=9)
        with open_engine(SHELF, spec=DEEP) as writer:
            writer.store(TOKENS, kv=new)
        for verb in ("retrieve", "by layers"):
            got = torch.zeros_like(KV)
            if verb == "retrieve":
                assert engine.retrieve(TOKENS[:8], kv=got).all() and torch.equal(got[:, :, :8], new[:, :, :8])
            else:
                engine.connector.__dict__.pop("write_layer")
                with engine.retrieve_layer(TOKENS, kv=got) as other:
                    finish(other, got, new)
        gate.open()
        loading.result()
    assert settled(engine)
    got = torch.zeros_like(KV)
    assert engine.retrieve(TOKENS, kv=got).all() and torch.equal(got, new), "nor kept in memory"


def test_a_removal_ends_what_a_whole_load_shares(open_engine: Open, ranges: Ranges, gate: Gate) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    gated(ranges, gate, 3)
    got = torch.zeros_like(KV)
    with engine.retrieve_layer(TOKENS, kv=got) as loading:
        assert loading.wait(2).all()
        task = engine.prefetch(TOKENS)
        until(lambda: any(one.hurried for one in tuple(engine._stack.stored[0].loads.arrivals._open.values())))
        engine.remove(TOKENS)
        gate.open()
        task.result(20)
        loading.result()
    assert settled(engine) and engine.lookup(TOKENS).tokens == 0 == len(engine._stack.memory)


def test_a_whole_load_gives_nothing_that_was_removed_meanwhile(open_engine: Open, gate: Gate) -> None:
    """All layers were read before the removal, and the whole chunk would be handed on after it."""
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    slow_writes(engine, gate, layer=3)
    arrivals = engine._stack.stored[0].loads.arrivals
    collect = arrivals.collect

    def remove_after(read: Any) -> Any:
        outcome = collect(read)
        engine.remove(TOKENS)
        return outcome

    arrivals.collect = remove_after  # type: ignore[method-assign]
    got = torch.zeros_like(KV)
    with engine.retrieve_layer(TOKENS, kv=torch.zeros_like(KV)) as loading:
        assert loading.wait(2).all()
        assert not engine.load(engine.segments(TOKENS), kv=got).result(20).any() and not got.any()
        gate.open()
        loading.result()
    assert settled(engine) and not len(engine._stack.memory)


# -- everything at once ------------------------------------------------------------------------------------------------


def mixed_load(open_engine: Open, *, seconds: float, capacity: str) -> None:
    prompts = [(tokens_of(48, seed), deep_kv(48, seed=seed)) for seed in range(4)]
    for tokens, kv in prompts:
        fill(open_engine, tokens=tokens, kv=kv)
    engine = open_engine({"type": "memory", "capacity": capacity}, SHELF | {"deadline": "2s"}, spec=DEEP)
    failures: list[str] = []
    end = time.monotonic() + seconds

    def work(seed: int) -> None:
        chance = Random(seed)
        while time.monotonic() < end and not failures:
            tokens, kv = prompts[chance.randrange(len(prompts))]
            got = torch.zeros_like(kv)
            what = chance.random()
            if what < 0.5:
                with engine.retrieve_layer(tokens, kv=got) as loading:
                    if chance.random() < 0.3:
                        time.sleep(chance.random() * 2e-3)
                        continue
                    masks = [mask for _, mask in loading]
                if not right(got, kv, masks):
                    failures.append(f"{seed}: by layers")
            elif what < 0.7:
                mask = engine.retrieve(tokens, kv=got)
                if not torch.equal(got[:, :, mask], kv[:, :, mask]) or got[:, :, ~mask].any():
                    failures.append(f"{seed}: whole")
            elif what < 0.85:
                task = engine.prefetch(tokens)
                task.cancel() if chance.random() < 0.5 else task.result(20)
            elif what < 0.9:
                engine.remove(tokens[: CHUNK * chance.randrange(1, 13)])
            else:
                with engine.store_layer(tokens, kv=kv) as storing:
                    for layer in range(LAYERS):
                        storing.layer(layer)
                    storing.finish()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
        assert not thread.is_alive()
    assert not failures
    assert engine.flush(20) and settled(engine)
    tier = engine._stack.stored[0]
    assert not tier.loads.arrivals._open and not tier.loads.flights._open and not engine._stack._by_layer._holders
    assert engine._stack.memory.pool.leaked == count(engine, "corrupt") == 0


@pytest.mark.parametrize("capacity", ["40KiB", "1MiB"])
def test_all_verbs_at_once(open_engine: Open, capacity: str) -> None:
    mixed_load(open_engine, seconds=1.5, capacity=capacity)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", ["24KiB", "40KiB", "100KiB", "1MiB"])
def test_all_verbs_at_once_for_long(open_engine: Open, capacity: str) -> None:
    mixed_load(open_engine, seconds=30, capacity=capacity)
