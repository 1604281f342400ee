"""Layers that are not there after all: damaged, lost or late, they end the prefix before anybody uses them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from clock_support import Hang
from core_support import CHUNK, Shelf, tokens_of
from faults_support import misses
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
)

from kvloom import StorageBackend
from kvloom.format import envelope

pytestmark = pytest.mark.usefixtures("ranges")


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
        assert count(engine, "corrupt") >= len(ends) and sum(misses(engine).values()) == 4 - want[-1]
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
    shelf._blobs[name] = b"".join(envelope.seal(header.description._replace(**change), parts))
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


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("fault", ["gone", "damaged", "raises"])
def test_a_chunk_in_the_middle_ends_it_as_it_ends_retrieve(
    open_engine: Open, ranges: Ranges, monkeypatch: pytest.MonkeyPatch, fault: str, whole: bool
) -> None:
    if whole:
        monkeypatch.setattr(Shelf, "get_range", StorageBackend.get_range)
    results = []
    for by_layer in (False, True):
        Shelf.shelves.clear()
        fill(open_engine)
        with open_engine(MEMORY, SHELF, spec=DEEP) as engine:
            shelf, bad = Shelf.shelves["default"], names_of(engine)[2]

            def fail(verb: str, key: str, bad: str = bad) -> None:
                if key == bad and fault == "raises" and verb != "contains":
                    raise OSError(5, "Input/output error")

            shelf.before = fail
            ranges.before = lambda key, offset: fail("range", key)
            if fault == "gone":
                del shelf._blobs[bad]
            elif fault == "damaged":
                damage(shelf, bad, layer=0)
            if by_layer:
                got, masks = by_layers(engine)
            else:
                got = torch.zeros_like(KV)
                masks = [engine.retrieve(TOKENS, kv=got)] * LAYERS
            assert chunks_in(masks) == [2] * LAYERS and right(got, KV, masks)
            missed = {key.reason: totals.chunks for key, totals in engine.counters().items() if key.name == "missed"}
            lookups = [engine.lookup(TOKENS).tokens for _ in range(2)]
            results.append((missed, lookups[-1], bad in shelf._blobs, count(engine, "tier_paused")))
    assert results[0] == results[1]


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


def test_a_hanging_store_ends_the_prefix_at_the_deadline(open_engine: Open, hang: Hang, ranges: Ranges) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    bad = names_of(engine)[2]
    ranges.before = lambda key, offset: hang("range", key) if key == bad and layer_at(offset) >= 3 else None
    got = torch.zeros_like(KV)
    with engine.retrieve_layer(TOKENS, kv=got) as loading:
        masks = [mask for _, mask in loading]
    assert chunks_in(masks) == [4, 4, 4, 2, 2, 2] and right(got, KV, masks)
    assert engine._stack.memory.pool.used_bytes > kept(engine)[0], "the call has its memory"
    assert engine.tiers["shelf"].abandoned_calls >= 1  # type: ignore[attr-defined]
    hang.open()
    assert settled(engine) and right(got, KV, masks)
    ranges.before = lambda *_: None
    got, masks = by_layers(engine)
    assert chunks_in(masks) == [4] * LAYERS and right(got, KV, masks), "the tier is back"


@pytest.mark.slow
def test_no_wait_takes_longer_than_the_deadline_however_slow_each_read_is(open_engine: Open, ranges: Ranges) -> None:
    """No single read is late, but all of them together are."""
    tokens, kv = tokens_of(160), deep_kv(160)
    fill(open_engine, tokens=tokens, kv=kv)
    engine = open_engine(MEMORY, SHELF | {"deadline": "2s"}, spec=DEEP)
    ranges.before = lambda key, offset: time.sleep(0.4)
    got = torch.zeros_like(kv)
    began = time.monotonic()
    with engine.retrieve_layer(tokens, kv=got) as loading:
        first = loading.wait(0)
        assert time.monotonic() - began < 8, "all of layer 0 takes 12 s"
        masks = [first, *(loading.wait(layer) for layer in range(1, LAYERS))]
    assert chunks_in(masks)[0] < 40 and right(got, kv, masks)
