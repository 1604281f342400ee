"""Bounds of a tier: capacity, time, quotas, and admission."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_support import SPEC, Shelf, kv_of, tokens_of
from policies_support import BLOB_BYTES, KV, MEMORY, SHELF, Open, count, eventually, held, stored

from kvloom import ConfigError, Engine, envelope
from kvloom.keys import salt_tag


def test_memory_that_is_not_to_be_had_is_said_at_start(open_engine: Open) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.0\.capacity: cannot allocate \d+ bytes of memory .*lower it"):
        open_engine({"type": "memory", "capacity": "900TiB"})


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["memory", "shelf"])
def test_nothing_is_served_past_its_time(open_engine: Open, clock: Callable[[float], None], where: str) -> None:
    tier = {"memory": MEMORY, "shelf": SHELF}[where] | {"ttl": "1h"}
    engine = open_engine(tier)
    stored(engine, 1)
    clock(3000)
    assert held(engine, 1, tier=where) == 16
    stored(engine, 2)
    clock(700)
    assert held(engine, 1, tier=where) == 0 and held(engine, 2, tier=where) == 16
    got = torch.zeros_like(KV)
    assert not engine.retrieve(tokens_of(16, 1), kv=got).any() and not got.any()
    stored(engine, 1)
    assert engine.retrieve(tokens_of(16, 1), kv=got).all(), "stored again, it is new again"


def test_the_time_counts_from_the_first_store_wherever_the_chunk_has_been_since(
    open_engine: Open, clock: Callable[[float], None]
) -> None:
    with open_engine(SHELF) as engine:
        stored(engine, 1)
    clock(1800)
    engine = open_engine(MEMORY | {"ttl": "1h"}, SHELF)
    assert engine.prefetch(tokens_of(16, 1)).result(20).all() and held(engine, 1, tier="memory") == 16
    clock(1900)
    assert held(engine, 1, tier="memory") == 0


def test_a_store_that_others_fill_is_held_to_the_time_as_well(
    open_engine: Open, clock: Callable[[float], None]
) -> None:
    with open_engine(SHELF) as engine:
        stored(engine, 1)
    clock(4000)
    engine = open_engine(MEMORY, SHELF | {"ttl": "1h"})
    assert eventually(lambda: engine.health().tiers[1].recovered)
    assert not engine.retrieve(tokens_of(16, 1), kv=torch.zeros_like(KV)).any()
    assert count(engine, "missed") > 0 and count(engine, "corrupt") == 0


@pytest.mark.usefixtures("hurried")
def test_what_is_past_its_time_is_deleted_though_nobody_asks(open_engine: Open, clock: Callable[[float], None]) -> None:
    engine = open_engine(SHELF | {"ttl": "1h"})
    stored(engine, 1, 2)
    clock(4000)
    assert eventually(lambda: not Shelf.shelves["default"].blobs)
    assert count(engine, "evicted", "expired") == 8
    assert engine.health().tiers[0].bytes == 0


@pytest.mark.parametrize("write", ["through", "on_evict"])
def test_what_is_past_a_tiers_time_is_not_written_to_it(
    open_engine: Open, clock: Callable[[float], None], write: str
) -> None:
    engine = open_engine(MEMORY, SHELF | {"ttl": "1h", "write": write})
    stored(engine, 1)
    clock(4000)
    shelf = Shelf.shelves["default"]
    shelf.delete_many(list(shelf.blobs))
    stored(engine, 1)  # memory has it still
    assert held(engine, 1, tier="memory") == 16
    engine.close()
    assert not shelf.blobs


def test_blobs_say_when_they_were_stored(open_engine: Open) -> None:
    engine = open_engine(SHELF)
    stored(engine, 1)
    for name, blob in Shelf.shelves["default"].blobs.items():
        header, _ = envelope.unseal(blob, key=name)
        assert abs(header.description.written - time.time()) < 60
    assert SPEC.num_layers


# -- quotas ------------------------------------------------------------------------------------------------------------


def test_a_tenant_over_its_quota_pays_itself(open_engine: Open) -> None:
    quota = {"*": 6 * BLOB_BYTES, "big": 12 * BLOB_BYTES}
    engine = open_engine(SHELF | {"capacity": "1MiB", "quota": quota})
    stored(engine, 1, 2, salt="small")
    stored(engine, 3, 4, 5, salt="big")
    stored(engine, 6)
    tag = salt_tag("small")
    assert sum(key.split("/")[1] == tag for key in Shelf.shelves["default"].blobs) == 6
    assert [held(engine, seed, salt="small") for seed in (1, 2)] == [8, 16], "its own oldest tail went"
    assert [held(engine, seed, salt="big") for seed in (3, 4, 5)] == [16, 16, 16] and held(engine, 6) == 16
    assert count(engine, "evicted", "quota") == 2


def test_a_tenant_over_its_quota_in_memory_pays_itself(open_engine: Open) -> None:
    engine = open_engine({"type": "memory", "capacity": "256KiB", "quota": "24KiB"})
    stored(engine, 1, 2, salt="small")
    stored(engine, 3, salt="other")
    sizes = [held(engine, seed, tier="memory", salt="small") for seed in (1, 2)]
    assert sizes == [8, 16] and held(engine, 3, tier="memory", salt="other") == 16


def heads_only(engine: Engine, names: list[str]) -> bool:
    """Return whether the shelf has at least one of a chain's names, and none without all before it."""
    blobs = Shelf.shelves["default"].blobs
    there = [name in blobs for name in names]
    return there == sorted(there, reverse=True) and any(there)


@pytest.mark.parametrize("bounds", [{"capacity": "1MiB", "quota": 6 * BLOB_BYTES}, {"capacity": 6 * BLOB_BYTES}])
@pytest.mark.parametrize("above", [[], [MEMORY], [{"type": "memory", "capacity": "24KiB"}]])
def test_of_a_prompt_longer_than_the_bounds_the_head_is_kept(
    open_engine: Open, bounds: dict[str, Any], above: list[dict[str, Any]]
) -> None:
    engine = open_engine(*above, SHELF | bounds)
    stored(engine, 1, length=16)
    stored(engine, 2, length=40)
    names = [str(segment.key) for segment in engine.segments(tokens_of(40, 2))]
    assert heads_only(engine, names) and len(Shelf.shelves["default"].blobs) == 6
    assert engine.lookup(tokens_of(40, 2), ["shelf"]).tokens == 24, "as much as fits; what is older has gone"
    gone = [key for key in engine.counters() if key.tier == "shelf" and key.name in ("dropped", "evicted")]
    assert sum(engine.counters()[key].chunks for key in gone) == 8, "all else is said to be gone"
    stored(engine, 2, length=40)
    assert heads_only(engine, names) and len(Shelf.shelves["default"].blobs) == 6, "nor is it different next time"
    stored(engine, 3, length=8)
    assert held(engine, 3) == 8, "others come in"
    assert heads_only(engine, names) and engine.lookup(tokens_of(40, 2), ["shelf"]).tokens == 16


def test_of_a_prompt_longer_than_the_quota_memory_keeps_the_head(open_engine: Open) -> None:
    engine = open_engine({"type": "memory", "capacity": "256KiB", "quota": "24KiB"})
    stored(engine, 1)
    stored(engine, 2, length=40)
    sizes = [engine.lookup(tokens_of(40, seed), ["memory"]).tokens for seed in (1, 2)]
    assert sizes == [0, 24] and engine._stack.memory.used_bytes == 24 << 10
    assert count(engine, "dropped", "over its salt's quota") == 4
    got = torch.zeros_like(kv_of(40, 2))
    mask = engine.retrieve(tokens_of(40, 2), kv=got)
    assert int(mask.sum()) == 24 and torch.equal(got[:, :, mask], kv_of(40, 2)[:, :, mask])


@pytest.mark.parametrize("verb", ["retrieve", "prefetch", "retrieve_layer", "store_layer"])
def test_nor_does_reading_such_a_prompt_push_out_its_head(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(Shelf, "threads", 1)  # what is in use cannot go: a tail that arrives before its head may stay
    tokens, kv = tokens_of(40, 2), kv_of(40, 2)
    if verb != "store_layer":
        with open_engine(SHELF) as engine:
            stored(engine, 2, length=40)
    engine = open_engine({"type": "memory", "capacity": "256KiB", "quota": "24KiB"}, SHELF)
    for _ in range(2):
        got = torch.zeros_like(kv)
        if verb == "retrieve":
            assert engine.retrieve(tokens, kv=got).all()
        elif verb == "prefetch":
            engine.prefetch(tokens).result(20)
        elif verb == "retrieve_layer":
            with engine.retrieve_layer(tokens, kv=got) as loading:
                assert loading.result().all()
        else:
            with engine.store_layer(tokens, kv=kv) as storing:
                for layer in range(SPEC.num_layers):
                    storing.layer(layer)
                storing.finish()
        # What was read lies in memory with its header, which is a page.
        assert engine.lookup(tokens, ["memory"]).tokens == (24 if verb == "store_layer" else 12)
    assert count(engine, "dropped") == (8 if verb == "store_layer" else 0)


def test_a_prompt_that_goes_on_does_not_push_out_its_own_head(open_engine: Open) -> None:
    """Its head is older than others', and then is stored again with more behind it."""
    engine = open_engine({"type": "memory", "capacity": "256KiB", "quota": "24KiB"})
    stored(engine, 1, length=40)
    stored(engine, 2, length=8)
    assert engine.lookup(tokens_of(40, 1), ["memory"]).tokens == 16
    mask = torch.ones(40, dtype=torch.bool)
    mask[:16] = False
    engine.store(tokens_of(40, 1), mask, kv=kv_of(40, 1))
    assert engine.lookup(tokens_of(40, 1), ["memory"]).tokens == 24 and held(engine, 2, tier="memory") == 0


# -- who comes in ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "kept"), [("lru", 0), ("tiny_lfu", 16)])
def test_a_scan_does_not_flush_what_is_used_with_tiny_lfu(open_engine: Open, policy: str, kept: int) -> None:
    engine = open_engine(SHELF | {"capacity": 8 * BLOB_BYTES, "policy": policy})
    stored(engine, 1, 2)
    for _ in range(4):
        for seed in (1, 2):
            assert engine.retrieve(tokens_of(16, seed), kv=torch.zeros_like(KV)).all()
    stored(engine, *range(10, 20))
    assert (held(engine, 1), held(engine, 2)) == (kept, kept)
