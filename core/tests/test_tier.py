"""A tier at the level of chunks: the seed storage interface's semantics, and what is exact stays exact."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from core_support import CHUNK, SPEC, Gate, Shelf, kv_of, tokens_of

from kvloom import ConfigError, Engine, Segment, chain, open_tier
from kvloom.tiers.stored.inflight import Wanted

MEMORY = {"type": "memory", "capacity": "1MiB"}
SHELF = {"type": "shelf", "deadline": "20s"}
SIGNS = SHELF | {"serializer": "signs"}
Open = Callable[..., Engine]


def chunks_of(count: int, seed: int = 0) -> list[tuple[Segment, torch.Tensor]]:
    kv = kv_of(count, seed)
    segments = chain(tokens_of(count, seed), chunk_tokens=CHUNK, fingerprint="f" * 32)
    return [(segment, kv[:, :, segment.start : segment.end].clone()) for segment in segments]


@pytest.mark.parametrize("block", ["memory", "dict", {"type": "dict", "capacity": "1MiB"}], ids=str)
def test_put_contains_get_close(block: str | dict[str, str]) -> None:
    tier = open_tier(block, SPEC)
    (first, one), (second, two) = chunks_of(8)
    assert tier.get(first.key) is None and not tier.contains(first.key)
    tier.put(first.key, one)
    assert tier.contains(first.key) and not tier.contains(second.key)
    kept = one.clone()
    one.zero_()
    got = tier.get(first.key)
    assert got is not None and torch.equal(got, kept), "the tier keeps a copy"
    got.zero_()
    again = tier.get(first.key)
    assert again is not None and torch.equal(again, kept), "and hands out copies"
    tier.put(second.key, two, blocking=False)
    late = tier.get(second.key)
    assert late is not None and torch.equal(late, two), "a get waits for the put before it"
    tier.close()
    tier.close()


@pytest.mark.parametrize("block", ["memory", "dict"])
def test_batches_count_and_are_lazy(block: str) -> None:
    tier = open_tier(block, SPEC)
    items = chunks_of(20)
    assert tier.batched_put((segment.key, chunk) for segment, chunk in items[:3]) == 3
    assert tier.batched_put([(segment.key, chunk) for segment, chunk in items[3:4]], blocking=False) == 1
    asked = []

    def keys():  # type: ignore[no-untyped-def]
        for segment, _ in items:
            asked.append(segment)
            yield segment.key

    results = tier.batched_get(keys())
    assert not asked
    first = next(results)
    assert first is not None and torch.equal(first, items[0][1]) and len(asked) == 1
    rest = list(results)
    assert [got is None for got in rest] == [False, False, False, True]
    tier.close()


def test_a_put_that_cannot_be_kept_is_not_counted() -> None:
    tier = open_tier({"type": "dict", "capacity": "8KiB"}, SPEC)
    big = torch.zeros(2, 2, 4096, 8, dtype=torch.bfloat16)
    (first, one), *_ = chunks_of(4)
    assert tier.batched_put([(first.key, big)]) == 0
    assert tier.batched_put([(first.key, one)]) == 1
    tier.close()


def test_an_invalid_device_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="nonsense"):
        open_tier("memory", SPEC, dst_device="nonsense")
    tier = open_tier("memory", SPEC, dst_device="meta")
    (first, one), *_ = chunks_of(4)
    tier.put(first.key, one)
    got = tier.get(first.key)
    assert got is not None and got.device.type == "meta"
    tier.close()


@pytest.mark.parametrize("chunk", [torch.zeros(2, 2, 4, 8), torch.zeros(2, 4, 8, dtype=torch.bfloat16)])
def test_a_chunk_of_the_wrong_kind_is_refused(chunk: torch.Tensor) -> None:
    for block in ("memory", "dict"):
        tier = open_tier(block, SPEC)
        with pytest.raises(ValueError, match="kv_chunk: expected"):
            tier.put(chunks_of(4)[0][0].key, chunk)
        tier.close()


def test_the_engines_tiers_are_the_same_objects(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF)
    tokens, kv = tokens_of(8), kv_of(8)
    engine.store(tokens, kv=kv)
    segment = engine.segments(tokens)[1]
    for tier in engine.tiers.values():
        got = tier.get(segment.key)
        assert got is not None and torch.equal(got, kv[:, :, 4:8])


# -- fidelity ----------------------------------------------------------------------------------------------------------


def test_a_lossy_chunk_is_served_marked_and_never_hides_an_exact_one(open_engine: Open) -> None:
    tokens, kv = tokens_of(8), kv_of(8)
    with open_engine(SIGNS) as first:
        first.store(tokens, kv=kv)
    engine = open_engine(MEMORY, SIGNS)
    got = torch.zeros_like(kv)
    assert engine.retrieve(tokens, kv=got).all()
    assert torch.equal(got, torch.where(kv > 0, 1.0, -1.0).to(kv.dtype))
    keys = [segment.key for segment in engine.segments(tokens)]
    memory = engine._stack.memory
    assert memory.find(keys) == [True, True] and memory.find(keys, exact=True) == [False, False]
    engine.store(tokens, kv=kv)
    assert engine.retrieve(tokens, kv=got).all() and torch.equal(got, kv), "the exact one took its place"
    assert memory.find(keys, exact=True) == [True, True]


def test_a_lossy_chunk_never_replaces_an_exact_one_in_memory(open_engine: Open) -> None:
    tokens, kv = tokens_of(4), kv_of(4)
    engine = open_engine(MEMORY, SIGNS)
    engine.store(tokens, kv=kv)
    assert engine.flush(20)
    (segment,) = engine.segments(tokens)
    tier = engine._stack.stored[0]
    read = tier.loads.read(Wanted(segment.key, (2, 2, 4, 8), 4), tier._context())
    assert read is not None
    loaded = tier.loads.collect(read)
    assert loaded is not None and loaded.chunk.exact
    loaded.release()
    got = torch.zeros_like(kv)
    engine.retrieve(tokens, kv=got)
    assert torch.equal(got, kv)


def test_a_lossy_chunk_that_took_an_exact_ones_place_a_moment_ago_is_not_written_on(open_engine: Open) -> None:
    tokens, kv = tokens_of(4), kv_of(4)
    with open_engine(SIGNS) as first:
        first.store(tokens, kv=kv)
    near, far = SIGNS | {"name": "near"}, SHELF | {"name": "far", "shelf": "far"}
    engine = open_engine(MEMORY, near, far)
    assert engine.retrieve(tokens, kv=torch.zeros_like(kv)).all()
    stack, (segment,) = engine._stack, engine.segments(tokens)
    # As `store` does, which had found the exact one in memory.
    stack.storer._write_from_memory(segment.key, stack.stored[1:], stack.context())
    assert engine.flush(20) and not Shelf.shelves["far"].blobs


@pytest.mark.parametrize("retrieve_first", [True, False])
def test_an_exact_blob_replaces_a_lossy_one_in_a_store(open_engine: Open, retrieve_first: bool) -> None:
    tokens, kv = tokens_of(8), kv_of(8)
    with open_engine(SIGNS) as first:
        first.store(tokens, kv=kv)
    lossy = dict(Shelf.shelves["default"].blobs)
    engine = open_engine(MEMORY, SHELF)
    if retrieve_first:
        assert not engine.retrieve(tokens, kv=torch.zeros_like(kv)).any(), "no reader for it here: a plain miss"
    engine.store(tokens, kv=kv)
    assert engine.flush(20)
    exact = Shelf.shelves["default"].blobs
    assert exact.keys() == lossy.keys() and all(exact[key] != lossy[key] for key in lossy)
    got = torch.zeros_like(kv)
    assert open_engine(SHELF).retrieve(tokens, kv=got).all() and torch.equal(got, kv)


def test_a_lossy_blob_never_replaces_an_exact_one_in_a_store(open_engine: Open) -> None:
    tokens, kv = tokens_of(8), kv_of(8)
    with open_engine(SHELF) as first:
        first.store(tokens, kv=kv)
    exact = dict(Shelf.shelves["default"].blobs)
    engine = open_engine(MEMORY, SIGNS)
    engine.store(tokens, kv=kv)
    assert engine.flush(20)
    assert Shelf.shelves["default"].blobs == exact
    got = torch.zeros_like(kv)
    assert open_engine(SIGNS).retrieve(tokens, kv=got).all() and torch.equal(got, kv), "and it is read exactly"


def test_lossy_chunks_are_not_written_on_to_other_tiers(open_engine: Open) -> None:
    near, far = SHELF | {"name": "near", "shelf": "near"}, SIGNS | {"name": "far", "shelf": "far"}
    tokens, kv = tokens_of(8), kv_of(8)
    with open_engine(far) as only_far:
        only_far.store(tokens, kv=kv)
    engine = open_engine(MEMORY, near, far)
    assert engine.retrieve(tokens, kv=torch.zeros_like(kv)).all() and engine.flush(20)
    assert not Shelf.shelves["near"].blobs


def test_exact_true_makes_lossy_blobs_a_miss_and_lossy_codecs_an_error(open_engine: Open) -> None:
    tokens, kv = tokens_of(8), kv_of(8)
    with open_engine(SIGNS) as first:
        first.store(tokens, kv=kv)
    strict = open_engine(MEMORY, SHELF, exact=True)
    assert not strict.retrieve(tokens, kv=torch.zeros_like(kv)).any()
    with pytest.raises(ConfigError, match=r"tiers\.1\.serializer: 'signs' is lossy"):
        open_engine(MEMORY, SIGNS, exact=True)


def test_a_serializer_that_cannot_take_the_connectors_format_is_refused(open_engine: Open) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.1\.serializer: 'signs' takes KV_BLOB; the connector gives KV_PAGES"):
        open_engine(MEMORY, SIGNS, connector="pages")


def test_what_somebody_reads_is_not_evicted(open_engine: Open) -> None:
    engine = open_engine({"type": "memory", "capacity": "16KiB"})
    tokens = tokens_of(4)
    engine.store(tokens, kv=kv_of(4))
    (segment,) = engine.segments(tokens)
    memory = engine._stack.memory
    (loaded,) = memory.lease([segment.key])
    assert loaded is not None
    reservations = [memory.reserve(4096) for _ in range(4)]
    assert [reservation is not None for reservation in reservations] == [True, True, True, False]
    assert memory.contains(segment.key) and torch.equal(loaded.chunk.tensor, kv_of(4))
    loaded.release()
    reservations.append(memory.reserve(4096))
    assert reservations[-1] is not None and not memory.contains(segment.key)
    for reservation in reservations:
        if reservation is not None:
            reservation.abandon()


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_timed_says_what_every_encode_took_and_changes_no_blob(
    open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, kv = tokens_of(4), kv_of(4)
    caplog.set_level(logging.INFO, "kvloom.telemetry.timed_serializer")
    engine = open_engine(SHELF | {"serializer": {"type": "raw", "timed": True}})
    engine.store(tokens, kv=kv)
    assert engine.flush(20) and "verb=encode" in caplog.text
    got = torch.zeros_like(kv)
    assert open_engine(SHELF).retrieve(tokens, kv=got).all() and torch.equal(got, kv)


def test_a_blob_as_long_as_its_serializer_says_is_read_back(open_engine: Open) -> None:
    tokens, kv = tokens_of(8), kv_of(8)
    tiers = {"type": "memory", "capacity": "16MiB"}, SHELF | {"serializer": "padded"}
    with open_engine(*tiers) as first:
        first.store(tokens, kv=kv)
    got = torch.zeros_like(kv)
    assert open_engine(*tiers).retrieve(tokens, kv=got).all() and torch.equal(got, kv)


def test_a_tier_that_is_never_written_is_still_read(open_engine: Open) -> None:
    tokens, kv = tokens_of(8), kv_of(8)
    with open_engine(SHELF) as first:
        first.store(tokens[:4], kv=kv)
    engine = open_engine(MEMORY, SHELF | {"write": "never"})
    assert engine.retrieve(tokens, kv=torch.zeros_like(kv)).sum() == 4
    engine.store(tokens, kv=kv)
    assert engine.flush(20) and len(Shelf.shelves["default"].blobs) == 1


def test_the_same_chunk_is_written_once_however_often_it_is_stored(open_engine: Open, gate: Gate) -> None:
    engine = open_engine(MEMORY, SHELF)
    puts = []

    def count(verb: str, key: str) -> None:
        if verb == "put" and not key.startswith("spec/"):
            puts.append(key)
            gate(verb, key)

    Shelf.shelves["default"].before = count
    for _ in range(5):
        engine.store(tokens_of(8), kv=kv_of(8))
    gate.open()
    assert engine.flush(20) and len(puts) == len(set(puts)) == 2


def test_the_spec_is_kept_beside_the_blobs(open_engine: Open) -> None:
    import json

    engine = open_engine(MEMORY, SHELF)
    engine.close()
    record = json.loads(Shelf.shelves["default"]._blobs[f"spec/{engine.fingerprint}.json"])
    assert record["spec"]["model"] == "tiny" and record["identity"]["model"]["model"] == "tiny"
