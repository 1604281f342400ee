"""Loads that share one chunk when it goes wrong: damage, a hanging store, a removal; and all verbs at once."""

from __future__ import annotations

import threading
import time
from random import Random
from typing import Any

import pytest
import torch
from clock_support import Hang, SkippingClock
from core_support import CHUNK, Gate, Shelf, tokens_of
from layers_support import (
    DEEP,
    KV,
    LAYERS,
    MEMORY,
    SHELF,
    TOKENS,
    Open,
    Ranges,
    chunks_in,
    count,
    damage,
    deep_kv,
    fill,
    finish,
    gated,
    layer_at,
    names_of,
    right,
    settled,
    slow_writes,
    until,
)

pytestmark = pytest.mark.usefixtures("ranges")


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
    assert not engine._stack.stored[0].loads.inflight._open


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
        until(lambda: any(one.hurried for one in tuple(engine._stack.stored[0].loads.inflight._open.values())))
        gate.open()
        assert task.result(20).all() and torch.equal(other, KV)
        finish(loading, got)
    assert settled(engine) and count(engine, "corrupt") == 0


def test_all_who_share_a_call_that_hangs_give_up_in_time(
    open_engine: Open, skipping: SkippingClock, hang: Hang, ranges: Ranges
) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    bad = names_of(engine)[2]
    ranges.before = lambda key, offset: hang("range", key) if key == bad and layer_at(offset) >= 3 else None
    kv = [torch.zeros_like(KV) for _ in range(2)]
    began = skipping.now()
    loadings = [engine.retrieve_layer(TOKENS, kv=one) for one in kv]
    for loading, got in zip(loadings, kv, strict=True):
        masks = [mask for _, mask in loading]
        assert chunks_in(masks) == [4, 4, 4, 2, 2, 2] and right(got, KV, masks)
        loading.close()
    assert skipping.now() - began < 5 * 20
    assert engine.retrieve(TOKENS, kv=torch.zeros_like(KV)).all(), "others begin anew"
    before = [one.clone() for one in kv]
    hang.open()
    assert settled(engine) and all(torch.equal(a, b) for a, b in zip(kv, before, strict=True))


def test_what_came_before_a_removal_is_not_given_to_who_comes_after(
    open_engine: Open, ranges: Ranges, gate: Gate
) -> None:
    """The KV stored after the removal differs here, to tell the two apart; real KV under one key never does."""
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
        until(lambda: any(one.hurried for one in tuple(engine._stack.stored[0].loads.inflight._open.values())))
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
    inflight = engine._stack.stored[0].loads.inflight
    await_all = inflight.await_all

    def remove_after(read: Any) -> Any:
        outcome = await_all(read)
        engine.remove(TOKENS)
        return outcome

    inflight.await_all = remove_after  # type: ignore[method-assign]
    got = torch.zeros_like(KV)
    with engine.retrieve_layer(TOKENS, kv=torch.zeros_like(KV)) as loading:
        assert loading.wait(2).all()
        assert not engine.load(engine.segments(TOKENS), kv=got).result(20).any() and not got.any()
        gate.open()
        loading.result()
    assert settled(engine) and not len(engine._stack.memory)


# -- everything at once ------------------------------------------------------------------------------------------------


def right_where_written(got: torch.Tensor, want: torch.Tensor, masks: list[torch.Tensor]) -> bool:
    """Each layer has what its mask says; and what else was written, before the mask was given, is right as well.

    A chunk that was read whole is written whole, though one before it may be lost in a later layer.
    """
    return all(torch.equal(got[:, layer, mask], want[:, layer, mask]) for layer, mask in enumerate(masks)) and bool(
        ((got == want) | (got == 0)).all()
    )


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
                if not right_where_written(got, kv, masks):
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
    assert not tier.loads.inflight._open and not engine._stack.storer._by_layer._holders
    assert engine._stack.memory.pool.leaked == count(engine, "corrupt") == 0


@pytest.mark.parametrize("capacity", ["40KiB", "1MiB"])
def test_all_verbs_at_once(open_engine: Open, capacity: str) -> None:
    mixed_load(open_engine, seconds=0.4, capacity=capacity)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", ["24KiB", "40KiB", "100KiB", "1MiB"])
def test_all_verbs_at_once_for_long(open_engine: Open, capacity: str) -> None:
    mixed_load(open_engine, seconds=15, capacity=capacity)
