"""KV layer by layer: what is said to be there is there, verified, and what is not there is said before it is used."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from core_support import CHUNK, Gate, Shelf, tokens_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layers_support import (
    DEEP,
    FAR,
    KV,
    LAYERS,
    MEMORY,
    NEAR,
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
    kept,
    layer_at,
    names_of,
    right,
    settled,
    slow_writes,
    store_layers,
)
from test_fork import in_child

from kvloom import BackendError, KVSpec, Segment, StorageBackend, envelope
from kvloom.tiers.layer_blobs import groups

pytestmark = pytest.mark.usefixtures("ranges")

# -- there and back ----------------------------------------------------------------------------------------------------

LAYOUTS = {
    "memory": (MEMORY,),
    "stored only": (SHELF,),
    "memory and stored": (MEMORY, SHELF),
    "memory of four chunks and stored": ({"type": "memory", "capacity": "16KiB"}, SHELF),
    "two stored": (NEAR, FAR),
}


@pytest.mark.parametrize("tiers", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_what_was_stored_by_layers_comes_back(open_engine: Open, tiers: tuple[dict[str, object], ...]) -> None:
    engine = open_engine(*tiers, spec=DEEP)
    tokens, kv = tokens_of(11), deep_kv(11)
    source = torch.zeros_like(kv)
    with engine.store_layer(tokens, kv=source) as storing:
        assert storing.mask.tolist() == [True] * 8 + [False] * 3
        for layer in range(LAYERS):
            source[:, layer] = kv[:, layer]
            storing.layer(layer)
            source[:, layer] = 7  # it may be overwritten
        storing.finish()
    assert engine.flush(20) and settled(engine)
    got = torch.zeros_like(kv)
    assert engine.retrieve(tokens, kv=got).tolist() == [True] * 8 + [False] * 3
    assert torch.equal(got[:, :, :8], kv[:, :, :8])
    got, masks = by_layers(engine, tokens, kv)
    assert chunks_in(masks) == [2] * LAYERS and right(got, kv, masks)


def same_as_retrieve(open_engine: Open, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    Shelf.shelves.clear()
    planes, layers = data.draw(st.integers(1, 2), label="planes"), data.draw(st.integers(1, 9), label="layers")
    spec = KVSpec("m", num_layers=layers, num_kv_heads=1, head_size=data.draw(st.sampled_from([1, 3, 64])),
                  dtype=data.draw(st.sampled_from(["bfloat16", "float32", "uint8"])), kv_planes=planes)  # fmt: skip
    monkeypatch.setattr("kvloom.tiers.layer_blobs.RANGE_BYTES", data.draw(st.sampled_from([1, 700, 1 << 20])))
    total = data.draw(st.integers(0, 30), label="tokens")
    tokens = tokens_of(total)
    kv = (torch.rand(spec.blob_shape(total), generator=torch.Generator().manual_seed(1)) * 200).to(spec.torch_dtype)
    skip = data.draw(st.integers(0, total // CHUNK), label="chunks masked out")
    mask = torch.arange(total) >= skip * CHUNK
    place = data.draw(st.lists(st.sampled_from(["near", "far", "both", "none"]), min_size=8, max_size=8))
    warm = data.draw(st.lists(st.booleans(), min_size=8, max_size=8), label="in memory")
    for name, tier in (("near", NEAR), ("far", FAR)):
        with open_engine(tier, spec=spec) as engine:
            here = [s for s, where in zip(engine.segments(tokens), place, strict=False) if where in (name, "both")]
            engine.save(here, kv=kv).result(20)
    capacity = data.draw(st.sampled_from(["64KiB", "256KiB", None]), label="memory")
    tiers = [NEAR | {"write": "never"}, FAR | {"write": "never"}]
    tiers = tiers if capacity is None else [{"type": "memory", "capacity": capacity}, *tiers]
    results = []
    for by_layer in (False, True):
        with open_engine(*tiers, spec=spec) as engine:
            segments = engine.segments(tokens)
            engine.load([s for s, w in zip(segments, warm, strict=False) if w], kv=torch.zeros_like(kv)).result(20)
            got = torch.zeros_like(kv)
            if by_layer:
                with engine.retrieve_layer(tokens, mask, kv=got) as loading:
                    masks = [one for _, one in loading]
                assert settled(engine) and len(masks) == layers
                assert all(torch.equal(one, masks[0]) for one in masks), "nothing failed part-way"
                assert loading.hit.tokens == int(masks[0].sum())
                assert sum(loading.hit.by_tier.values()) == loading.hit.tokens
                there = masks[-1]
            else:
                there = engine.retrieve(tokens, mask, kv=got)
            assert torch.equal(got[:, :, there], kv[:, :, there]) and not got[:, :, ~there].any()
            missed = sum(t.chunks for key, t in engine.counters().items() if key.name == "missed" and not key.tier)
            results.append((there.tolist(), missed, engine.lookup(tokens).tokens))
    assert results[0] == results[1]


@given(data=st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_gives_what_retrieve_gives(open_engine: Open, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    """Whatever the shape, whatever is where: the same mask, the same bytes, the same events, the same hits later."""
    same_as_retrieve(open_engine, monkeypatch, data)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_gives_what_retrieve_gives_at_length(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    same_as_retrieve(open_engine, monkeypatch, data)


def test_a_prompt_longer_than_memory_passes_through(open_engine: Open) -> None:
    tokens, kv = tokens_of(120), deep_kv(120)
    fill(open_engine, tokens=tokens, kv=kv)
    engine = open_engine({"type": "memory", "capacity": "16KiB"}, SHELF, spec=DEEP)
    got, masks = by_layers(engine, tokens, kv)
    assert chunks_in(masks) == [30] * LAYERS and right(got, kv, masks)
    assert count(engine, "tier_error") == 0


def test_chunks_that_were_read_are_in_memory_afterwards(open_engine: Open) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks)
    assert engine.lookup(TOKENS).by_tier == {"memory": 16}
    totals = {(key.name, key.tier): value for key, value in engine.counters().items()}
    assert (
        totals["retrieved", ""].tokens
        == 16
        == totals["retrieved", "shelf"].tokens
        == totals["promoted", "memory"].tokens
    )
    assert totals["retrieved", ""].bytes == KV.nbytes and totals["retrieved", "shelf"].bytes == KV.nbytes + 4 * 4096
    Shelf.shelves["default"]._blobs.clear()
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks), "and they are whole and right"


def test_a_far_hit_is_written_to_the_near_tier(open_engine: Open) -> None:
    with open_engine(FAR, spec=DEEP) as only_far:
        only_far.store(TOKENS, kv=KV)
    engine = open_engine(NEAR, FAR, spec=DEEP)
    got, masks = by_layers(engine)
    assert engine.flush(20) and right(got, KV, masks)
    assert set(Shelf.shelves["near"].blobs) == set(Shelf.shelves["far"].blobs)


# -- in order, and ahead -----------------------------------------------------------------------------------------------


def test_groups_of_layers_cover_all_in_order_and_begin_with_one() -> None:
    for layers in range(1, 70):
        for nbytes in (0, 1, 1000, 300_000, 600_000, 5_000_000):
            parts = groups(layers, nbytes)
            assert [layer for part in parts for layer in part] == list(range(layers)) and len(parts[0]) == 1
            assert all(len(part) * nbytes <= max(1 << 20, nbytes) for part in parts)


def test_the_first_layer_of_all_comes_before_the_second_of_any(
    open_engine: Open, ranges: Ranges, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(open_engine)
    monkeypatch.setattr(Shelf, "threads", 1)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    asked: list[tuple[int, str]] = []
    ranges.before = lambda key, offset: asked.append((layer_at(offset), key))
    got, masks = by_layers(engine)
    assert right(got, KV, masks)
    names = names_of(engine)
    starts = [part.start for part in groups(LAYERS, STEP)]
    assert starts == [0, 1, 3, 5], "two layers lie in one range"
    headers = [(-1, name) for name in names]
    assert [one for one in asked if one[0] >= 0] == [(s, name) for s in starts for name in names for _ in "KV"]
    assert [one for one in asked if one[0] < 0] == headers, "each header once"


def test_a_layer_is_there_while_the_next_is_still_being_read(open_engine: Open, ranges: Ranges, gate: Gate) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    ranges.before = lambda key, offset: gate("range", key) if layer_at(offset) >= 1 else None
    got = torch.zeros_like(KV)
    with engine.retrieve_layer(TOKENS, kv=got) as loading:
        assert loading.hit.by_tier == {"shelf": 16}
        assert loading.wait(0).all() and torch.equal(got[:, 0], KV[:, 0]) and not got[:, 1:].any()
        gate.open()
        assert loading.result().all() and torch.equal(got, KV)
    assert settled(engine)


def test_no_more_is_under_way_than_the_window(open_engine: Open, ranges: Ranges, gate: Gate) -> None:
    tokens, kv = tokens_of(400), deep_kv(400)
    fill(open_engine, tokens=tokens, kv=kv)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    ranges.before = lambda key, offset: gate("range", key)
    got = torch.zeros_like(kv)
    with engine.retrieve_layer(tokens, kv=got) as loading:
        while gate.waiting < Shelf.threads:
            pass
        tier = engine._stack.stored[0]
        assert len(tier.calls.reads._queue) <= Shelf.threads, "the tier stays free for others"
        gate.open()
        assert loading.result().all() and torch.equal(got, kv)


# -- not there after all -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [(MEMORY,), ()], ids=["memory", "stored only"])
@given(data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_corrupt_layer_ends_the_prefix_at_that_layer_exactly(
    open_engine: Open, memory: tuple[dict[str, object], ...], data: st.DataObject
) -> None:
    Shelf.shelves.clear()
    shelf = fill(open_engine)
    at = st.tuples(st.integers(0, 3), st.integers(0, LAYERS - 1), st.integers(0, 1))
    damages = data.draw(st.lists(at, min_size=1, max_size=3, unique_by=lambda one: one[0]))
    with open_engine(*memory, SHELF, spec=DEEP) as engine:
        names = names_of(engine)
        for chunk, layer, plane in damages:
            damage(shelf, names[chunk], layer=layer, plane=plane)
        got, masks = by_layers(engine)
        want = [min([4, *(c for c, k, _ in damages if k <= layer)]) for layer in range(LAYERS)]
        assert chunks_in(masks) == want
        assert right(got, KV, masks), "earlier layers are right, later ones untouched"
        ends = {c for c, k, _ in damages if want[k] == c and (k == 0 or want[k - 1] > c)}
        assert not {names[chunk] for chunk in ends} & set(shelf.blobs), "what ended the prefix is removed"
        assert count(engine, "corrupt") >= len(ends) and count(engine, "missed") == 1
        assert engine.lookup(TOKENS).tokens == CHUNK * min(
            chunk for chunk in range(4) if names[chunk] not in shelf.blobs
        )


DAMAGE: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "gone": lambda blob, other: None,
    "cut in the last layer": lambda blob, other: blob[:-1],
    "cut in the header": lambda blob, other: blob[:100],
    "bit flipped in the header": lambda blob, other: blob[:130] + bytes([blob[130] ^ 1]) + blob[131:],
    "swapped": lambda blob, other: other,
    "empty": lambda blob, other: b"",
    "foreign": lambda blob, other: b"%PDF-1.7 " * 999,
}


@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("at", [0, 2])
def test_a_blob_that_is_no_good_is_never_used(
    open_engine: Open, harm: Callable[[bytes, bytes], bytes | None], at: int
) -> None:
    shelf = fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    names = names_of(engine)
    assert engine.lookup(TOKENS).tokens == 16
    blob = harm(shelf._blobs[names[at]], shelf._blobs[names[3 - at]])
    if blob is None:
        del shelf._blobs[names[at]]
    else:
        shelf._blobs[names[at]] = blob
    got, masks = by_layers(engine)
    late = harm is DAMAGE["cut in the last layer"]
    assert chunks_in(masks) == [4 if late else at] * (LAYERS - 1) + [at] and right(got, KV, masks)
    assert engine.lookup(TOKENS).tokens == at * CHUNK, "and the forecast has learnt"
    engine.store(TOKENS, kv=KV)
    assert engine.flush(20)
    got, masks = by_layers(open_engine(SHELF, spec=DEEP))
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"shape": (2, LAYERS, 2, 32)},
        {"format": "kv_pages"},
        {"num_tokens": 3},
        {"serializer": "other"},
        {"fidelity": "rough"},
        {"written": 1},
    ],
    ids=str,
)
def test_an_intact_blob_of_something_else_is_never_used(open_engine: Open, change: dict[str, object]) -> None:
    shelf = fill(open_engine)
    engine = open_engine(MEMORY, SHELF | {"ttl": "1h"}, spec=DEEP, exact=True)
    name = names_of(engine)[1]
    header, payload = envelope.unseal(shelf._blobs[name], key=name)
    parts = envelope.split(header, payload)
    shelf._blobs[name] = b"".join(envelope.seal(replace(header.description, **change), parts))
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [1] * LAYERS and right(got, KV, masks)


def test_layers_that_read_badly_once_are_read_again(open_engine: Open, ranges: Ranges) -> None:
    shelf = fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    name = names_of(engine)[1]
    good = shelf._blobs[name]

    def flicker(key: str, offset: int) -> None:
        if key == name and layer_at(offset) >= 3:
            damage(shelf, name, layer=3)

    def mend(verb: str, key: str) -> None:
        if verb == "get" and key == name:
            shelf._blobs[name] = good

    ranges.before, Shelf.shelves["default"].before = flicker, mend
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks) and count(engine, "corrupt") == 0


def test_what_one_tier_lost_another_may_have(open_engine: Open) -> None:
    for tier in (NEAR, FAR):
        with open_engine(tier, spec=DEEP) as engine:
            engine.store(TOKENS, kv=KV)
    engine = open_engine(MEMORY, NEAR, FAR, spec=DEEP)
    near = Shelf.shelves["near"]
    damage(near, names_of(engine)[1], layer=4)
    del near._blobs[names_of(engine)[2]]
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks)
    assert count(engine, "corrupt") == 1 and count(engine, "missed") == 0


def test_layers_of_two_fidelities_are_never_mixed(open_engine: Open) -> None:
    """The near tier fails at layer 4; what the far one has went through a lossy codec."""
    with open_engine(NEAR, spec=DEEP) as engine:
        engine.store(TOKENS, kv=KV)
    with open_engine(FAR | {"serializer": "signs"}, spec=DEEP) as engine:
        engine.store(TOKENS, kv=KV)
    engine = open_engine(MEMORY, NEAR, FAR | {"serializer": "signs"}, spec=DEEP)
    damage(Shelf.shelves["near"], names_of(engine)[1], layer=4)
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * 4 + [1] * 2 and right(got, KV, masks)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RuntimeError("odd"), MemoryError()])
def test_a_store_that_raises_ends_the_prefix(open_engine: Open, ranges: Ranges, error: Exception) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    bad = names_of(engine)[2]

    def fail(key: str, offset: int) -> None:
        if key == bad and layer_at(offset) >= 3:
            raise error

    ranges.before = fail
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4, 4, 4, 2, 2, 2] and right(got, KV, masks)
    assert count(engine, "tier_error") in (1, 2) and count(engine, "corrupt") == 0, "the next may be under way already"
    assert bad in Shelf.shelves["default"].blobs, "what could not be read is not removed"


def test_the_kth_read_that_fails_never_gives_wrong_kv(open_engine: Open, ranges: Ranges) -> None:
    for k in range(1, 200):
        Shelf.shelves.clear()
        fill(open_engine)
        calls = 0

        def fail(*_: object, k: int = k) -> None:
            nonlocal calls
            calls += 1
            if calls == k:
                raise OSError(5, "Input/output error")

        with open_engine(MEMORY, SHELF, spec=DEEP) as engine:
            ranges.before = fail
            got, masks = by_layers(engine)
            assert right(got, KV, masks) and chunks_in(masks)
            ranges.before = lambda *_: None
            got, masks = by_layers(engine)
            assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks)
        if calls < k:
            return
    pytest.fail("never got through without a fault")


def test_a_hanging_store_ends_the_prefix_at_the_deadline(open_engine: Open, ranges: Ranges, gate: Gate) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF | {"deadline": "1s"}, spec=DEEP)
    bad = names_of(engine)[2]
    ranges.before = lambda key, offset: gate("range", key) if key == bad and layer_at(offset) >= 3 else None
    got = torch.zeros_like(KV)
    with engine.retrieve_layer(TOKENS, kv=got) as loading:
        masks = [mask for _, mask in loading]
    assert chunks_in(masks) == [4, 4, 4, 2, 2, 2] and right(got, KV, masks)
    assert engine._stack.memory.pool.used_bytes > kept(engine)[0], "the call has its memory"
    assert engine.tiers["shelf"].abandoned_calls >= 1  # type: ignore[attr-defined]
    gate.open()
    assert settled(engine) and right(got, KV, masks)
    ranges.before = lambda *_: None
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks), "the tier is back"


def test_no_wait_takes_longer_than_the_deadline_however_slow_each_read_is(open_engine: Open, ranges: Ranges) -> None:
    """No single read is late, but all of them together are."""
    tokens, kv = tokens_of(160), deep_kv(160)
    fill(open_engine, tokens=tokens, kv=kv)
    engine = open_engine(MEMORY, SHELF | {"deadline": "1s"}, spec=DEEP)
    ranges.before = lambda key, offset: time.sleep(0.1)
    got = torch.zeros_like(kv)
    began = time.monotonic()
    with engine.retrieve_layer(tokens, kv=got) as loading:
        first = loading.wait(0)
        assert time.monotonic() - began < 2.5, "all of layer 0 takes 3 s"
        masks = [first, *(loading.wait(layer) for layer in range(1, LAYERS))]
    assert chunks_in(masks)[0] < 40 and right(got, kv, masks)


# -- cancelled, evicted, removed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "close", "leave", "engine"])
def test_what_is_cancelled_never_writes_afterwards(open_engine: Open, ranges: Ranges, gate: Gate, how: str) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF | {"deadline": "500ms"}, spec=DEEP)
    ranges.before = lambda key, offset: gate("range", key) if layer_at(offset) >= 3 else None
    got = torch.zeros_like(KV)
    loading = engine.retrieve_layer(TOKENS, kv=got)
    mask = loading.wait(2)
    assert mask.all()
    if how == "leave":
        with pytest.raises(KeyError), loading:
            raise KeyError
    elif how == "engine":
        engine.close()
    else:
        getattr(loading, how)()
    before = got.clone()
    with pytest.raises(BackendError, match="closed"):
        loading.wait(3)
    assert loading.wait(2).all(), "what was there is there"
    gate.open()
    assert settled(engine) and torch.equal(got, before) and not got[:, 3:].any()
    loading.close()


def test_what_arrived_before_a_cancel_is_not_written_after_it(open_engine: Open, ranges: Ranges, gate: Gate) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    ranges.before = lambda key, offset: gate("range", key) if layer_at(offset) >= 0 else None
    got = torch.zeros_like(KV)
    loading = engine.retrieve_layer(TOKENS, kv=got)
    while not gate.waiting:
        pass
    runs = loading._fetch.runs

    def cancel_at_the_last_moment(group: range) -> Any:
        for run in runs(group):
            loading.cancel()
            yield run

    loading._fetch.runs = cancel_at_the_last_moment  # type: ignore[method-assign]
    gate.open()
    assert loading.wait(0).all(), "for this layer it was too late"
    with pytest.raises(BackendError, match="closed"):
        loading.wait(1)
    loading.close()
    assert settled(engine) and torch.equal(got[:, 0], KV[:, 0]) and not got[:, 1:].any()


def test_many_are_cancelled_at_any_moment_and_nothing_is_lost(open_engine: Open, ranges: Ranges) -> None:
    tokens, kv = tokens_of(80), deep_kv(80)
    fill(open_engine, tokens=tokens, kv=kv)
    engine = open_engine({"type": "memory", "capacity": "64KiB"}, SHELF, spec=DEEP)
    for number in range(60):
        got = torch.zeros_like(kv)
        loading = engine.retrieve_layer(tokens, kv=got)
        time.sleep(number % 20 * 2e-4)
        loading.close()
        after = got.clone()
        assert torch.equal(torch.where(after == 0, kv, after), kv), "all that was written is right"
        assert torch.equal(after, got)
    assert settled(engine)
    assert count(engine, "tier_error") == count(engine, "corrupt") == 0


@pytest.mark.parametrize("below", [(), (SHELF,)], ids=["memory", "stored"])
def test_what_is_being_loaded_is_not_evicted(
    open_engine: Open, gate: Gate, below: tuple[dict[str, object], ...]
) -> None:
    if below:
        fill(open_engine)
    engine = open_engine({"type": "memory", "capacity": "48KiB"}, *below, spec=DEEP)
    if not below:
        engine.store(TOKENS, kv=KV)
    slow_writes(engine, gate, layer=3)
    got = torch.zeros_like(KV)
    with engine.retrieve_layer(TOKENS, kv=got) as loading:
        assert loading.wait(2).all()
        for seed in range(1, 12):
            engine.store(tokens_of(16, seed), kv=deep_kv(16, seed=seed))
        gate.open()
        assert loading.result().all() and torch.equal(got, KV)
    assert settled(engine)


@pytest.mark.parametrize("verb", ["remove", "clear"])
def test_a_removal_is_not_undone_by_a_load_under_way(open_engine: Open, gate: Gate, verb: str) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    slow_writes(engine, gate, layer=5)
    with engine.retrieve_layer(TOKENS, kv=torch.zeros_like(KV)) as loading:
        assert loading.wait(2).all()
        engine.remove(TOKENS) if verb == "remove" else engine.clear()
        gate.open()
        loading.result()
    assert engine.lookup(TOKENS).tokens == 0 == len(engine._stack.memory) and settled(engine)


def test_loads_share_a_small_memory(open_engine: Open) -> None:
    """Eight at a time, each longer than memory: nobody waits for another for ever, and nobody gets another's KV."""
    prompts = [(tokens_of(48, seed), deep_kv(48, seed=seed)) for seed in range(8)]
    for tokens, kv in prompts:
        fill(open_engine, tokens=tokens, kv=kv)
    engine = open_engine({"type": "memory", "capacity": "40KiB"}, SHELF, spec=DEEP)
    failures: list[str] = []

    def load(seed: int) -> None:
        tokens, kv = prompts[seed]
        for _ in range(5):
            got = torch.zeros_like(kv)
            with engine.retrieve_layer(tokens, kv=got) as loading:
                masks = [mask for _, mask in loading]
            if chunks_in(masks) != [12] * LAYERS or not right(got, kv, masks):
                failures.append(f"{seed}: {chunks_in(masks)}")

    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and settled(engine)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_never_stuck_on_what_its_parent_began(open_engine: Open, ranges: Ranges, gate: Gate) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    other = tokens_of(16, 5)
    ranges.before = lambda key, offset: gate("range", key) if layer_at(offset) >= 1 else None
    got = torch.zeros_like(KV)
    with engine.retrieve_layer(TOKENS, kv=got) as loading, engine.store_layer(other, kv=KV) as storing:
        assert loading.wait(0).all()
        storing.layer(0)

        def work() -> None:
            with pytest.raises(BackendError, match="process"):
                loading.wait(1)
            with pytest.raises(BackendError, match="closed"):
                storing.layer(1)
            loading.close()
            storing.close()

        with loading._writing, storing._reading, loading._changed:
            in_child(work)
        gate.open()
        assert loading.result().all() and torch.equal(got, KV)
        for layer in range(1, LAYERS):
            storing.layer(layer)
        storing.finish()
    assert engine.lookup(other).tokens == 16 and settled(engine)


# -- what has no layers ------------------------------------------------------------------------------------------------


def test_blobs_without_layers_are_read_whole(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """One buffer, another serializer, or a backend that reads no ranges: slower, but right."""
    monkeypatch.setattr("kvloom.builtin.raw._SMALL_BYTES", 1 << 20)
    fill(open_engine)
    got, masks = by_layers(open_engine(MEMORY, SHELF, spec=DEEP))
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks)
    lossy = SHELF | {"serializer": "signs", "shelf": "lossy"}
    with open_engine(lossy, spec=DEEP) as engine:
        engine.store(TOKENS, kv=KV)
    got, masks = by_layers(open_engine(MEMORY, lossy, spec=DEEP))
    assert chunks_in(masks) == [4] * LAYERS and right(got, torch.where(KV > 0, 1.0, -1.0).to(KV.dtype), masks)
    monkeypatch.setattr(Shelf, "get_range", StorageBackend.get_range)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    damage(Shelf.shelves["default"], names_of(engine)[2], layer=4)
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [2] * LAYERS and right(got, KV, masks)


def test_what_is_held_makes_room_for_what_is_read_whole(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half of the prompt fills memory; the other half has to come through it."""
    monkeypatch.setattr(Shelf, "get_range", StorageBackend.get_range)
    fill(open_engine)
    engine = open_engine({"type": "memory", "capacity": "16KiB"}, SHELF, spec=DEEP)
    assert engine.retrieve(TOKENS[:8], kv=torch.zeros_like(KV)).all()
    assert engine._stack.memory.pool.used_bytes == 16 << 10
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks)
    assert not [key for key in engine.counters() if key.name == "missed"]


@pytest.mark.parametrize("at", range(4))
def test_a_chunk_that_is_read_whole_is_asked_for_once(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """There is room for one at a time, and one is gone."""
    monkeypatch.setattr(Shelf, "get_range", StorageBackend.get_range)
    fill(open_engine)
    engine = open_engine({"type": "memory", "capacity": "16KiB"}, SHELF, spec=DEEP)
    names, shelf = names_of(engine), Shelf.shelves["default"]
    asked: list[str] = []

    def lose(verb: str, key: str) -> None:
        if verb == "get":
            asked.append(key)
            shelf._blobs.pop(names[at], None)

    shelf.before = lose
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [at] * LAYERS and right(got, KV, masks)
    assert len(asked) == len(set(asked)) and set(names[: at + 1]) <= set(asked)


def test_a_connector_without_layers_is_refused(open_engine: Open) -> None:
    engine = open_engine(MEMORY, connector="pages", spec=DEEP)
    for verb in (engine.retrieve_layer, engine.store_layer):
        with pytest.raises(NotImplementedError, match="'pages' has KV_PAGES, which has no layers"):
            verb(TOKENS, kv=KV)


def test_a_connector_that_fails_says_so_and_nothing_is_lost(open_engine: Open) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)

    def write_layer(layer: int, segments: Any, chunks: Any, **where: Any) -> None:
        if layer == 3:
            raise RuntimeError("the device is gone")

    engine.connector.write_layer = write_layer  # type: ignore[method-assign]
    with engine.retrieve_layer(TOKENS, kv=torch.zeros_like(KV)) as loading:
        assert loading.wait(2).all()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the device is gone"):
                loading.result()
    assert settled(engine)


def test_misuse_is_a_value_error(open_engine: Open) -> None:
    engine = open_engine(MEMORY, spec=DEEP)
    with pytest.raises(ValueError, match="kv: expected"):
        engine.retrieve_layer(TOKENS, kv=KV[:1])
    with pytest.raises(ValueError, match="whole number of chunks"):
        engine.retrieve_layer(TOKENS, torch.arange(16) >= 3, kv=KV)
    with engine.retrieve_layer(TOKENS, kv=KV) as loading:
        assert chunks_in([loading.result()]) == [0] and not loading.hit
        for layer in (-1, LAYERS):
            with pytest.raises(ValueError, match=f"layer: {layer} of 6"):
                loading.wait(layer)
    with engine.store_layer(TOKENS, kv=KV) as storing:
        with pytest.raises(ValueError, match="layer: 6 of 6"):
            storing.layer(6)
        with pytest.raises(ValueError, match="kv: expected"):
            storing.layer(0, kv=KV[:1])
    assert settled(engine) and not len(engine._stack.memory)


# -- storing -----------------------------------------------------------------------------------------------------------


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
    store_layers(engine, TOKENS, KV, reversed(range(LAYERS)))
    assert read == [(layer, [segments[1], segments[3]]) for layer in reversed(range(LAYERS))]
    read.clear()
    store_layers(engine, TOKENS, KV)
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
    insert = engine._stack.insert

    def remove_before(*args: Any, **kwargs: Any) -> None:
        engine.remove(TOKENS[:8])
        insert(*args, **kwargs)

    engine._stack.insert = remove_before  # type: ignore[method-assign]
    store_layers(engine, TOKENS, KV)
    assert engine.flush(20) and settled(engine)
    assert engine.find(engine.segments(TOKENS)).tolist() == [False, False, True, True]
