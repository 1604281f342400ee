"""Loads by layers that are cancelled, or whose chunks are removed meanwhile: nothing is written afterwards, or lost."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
from clock_support import Hang
from core_support import Gate, tokens_of
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
    deep_kv,
    fill,
    layer_at,
    right,
    settled,
    slow_writes,
)
from test_fork import in_child

from kvloom import BackendError

pytestmark = pytest.mark.usefixtures("ranges")


@pytest.mark.parametrize("how", ["cancel", "close", "leave", "engine"])
def test_what_is_cancelled_never_writes_afterwards(open_engine: Open, hang: Hang, ranges: Ranges, how: str) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    ranges.before = lambda key, offset: hang("range", key) if layer_at(offset) >= 3 else None
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
    hang.open()
    assert settled(engine) and torch.equal(got, before) and not got[:, 3:].any()
    loading.close()


def test_what_arrived_before_a_cancel_is_not_written_after_it(open_engine: Open, ranges: Ranges, gate: Gate) -> None:
    fill(open_engine)
    engine = open_engine(MEMORY, SHELF, spec=DEEP)
    ranges.before = lambda key, offset: gate("range", key) if layer_at(offset) >= 0 else None
    got = torch.zeros_like(KV)
    loading = engine.retrieve_layer(TOKENS, kv=got)
    gate.reached()
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
