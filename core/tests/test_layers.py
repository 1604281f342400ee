"""KV layer by layer: what is said to be there is there, in order, and each layer while the next is being read."""

from __future__ import annotations

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
    deep_kv,
    fill,
    layer_at,
    names_of,
    right,
    settled,
)

from kvloom import KVSpec
from kvloom.tiers.stored.layer_ranges import groups

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
    monkeypatch.setattr("kvloom.tiers.stored.layer_ranges.RANGE_BYTES", data.draw(st.sampled_from([1, 700, 1 << 20])))
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
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_gives_what_retrieve_gives_at_length(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    same_as_retrieve(open_engine, monkeypatch, data)


def test_a_chunk_that_its_own_loading_evicts_is_read_in_the_room_of_those_before_it(open_engine: Open) -> None:
    """Memory has room for four chunks, and holds the last four of five. The second tier asked has the last of all."""
    spec = KVSpec("m", num_layers=5, num_kv_heads=1, head_size=64, dtype="float32")
    tokens, kv = tokens_of(20), torch.rand(spec.blob_shape(20))
    for tier, here in ((NEAR, slice(0, 4)), (FAR, slice(4, 5))):
        with open_engine(tier, spec=spec) as engine:
            engine.save(engine.segments(tokens)[here], kv=kv).result(20)
    tiers = {"type": "memory", "capacity": "64KiB"}, NEAR | {"write": "never"}, FAR | {"write": "never"}
    engine, got = open_engine(*tiers, spec=spec), torch.zeros_like(kv)
    engine.load(engine.segments(tokens)[1:], kv=got).result(20)
    with engine.retrieve_layer(tokens, kv=got) as loading:
        assert loading.hit.by_tier == {"near": 4, "memory": 16} and loading.result().all()
    assert torch.equal(got, kv)


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
        gate.reached(Shelf.threads)
        tier = engine._stack.stored[0]
        assert len(tier.calls.reads._queue) <= Shelf.threads, "the tier stays free for others"
        gate.open()
        assert loading.result().all() and torch.equal(got, kv)
