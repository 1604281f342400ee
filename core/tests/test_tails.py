"""The tail of a prompt, behind its last whole chunk, is kept and found by longer prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from clock_support import Hang
from core_support import SPEC, Shelf, Watcher, Witness, eventually
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import Engine, Hit, KVSpec, Registry

CHUNK, PIECE = 64, 16
MEMORY: dict[str, Any] = {"type": "memory", "capacity": "16MiB"}
SHELF: dict[str, Any] = {"type": "shelf"}
TOKENS = torch.arange(3 * CHUNK)
KV = torch.randn(SPEC.blob_shape(3 * CHUNK), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
Open = Callable[..., Engine]


@pytest.fixture
def open_engine(open_engine: Open) -> Open:
    return partial(open_engine, chunk_tokens=CHUNK)


def stored(engine: Engine, length: int, *, noise: int = 0) -> None:
    """The first tokens, and others behind them."""
    tokens = torch.cat([TOKENS[:length], -1 - torch.arange(noise)])
    kv = torch.cat([KV[:, :, :length], torch.ones(SPEC.blob_shape(noise), dtype=torch.bfloat16)], dim=2)
    engine.store(tokens, kv=kv)
    assert engine.flush(20)


def retrieved(engine: Engine, length: int, *, by_layer: bool = False) -> int:
    """The number of tokens that came; fails if they are wrong, or no prefix."""
    got = torch.zeros_like(KV[:, :, :length])
    if by_layer:
        with engine.retrieve_layer(TOKENS[:length], kv=got) as loading:
            mask = loading.result()
            assert loading.hit.tokens == int(mask.count_nonzero())
    else:
        mask = engine.retrieve(TOKENS[:length], kv=got)
    count = int(mask.count_nonzero())
    assert bool(mask[:count].all()) and torch.equal(got[:, :, :count], KV[:, :, :count]) and not got[:, :, count:].any()
    return count


def counted(engine: Engine, name: str, tier: str = "") -> int:
    return sum(n.tokens for key, n in engine.counters().items() if (key.name, key.tier) == (name, tier))


def kept(length: int, common: int) -> set[tuple[int, int]]:
    """The spans that a sequence of that length leaves and that concern only its first `common` tokens."""
    found, at = set(), 0
    sizes = [CHUNK] * (length // CHUNK) + [PIECE << bit for bit in (1, 0) if length % CHUNK // PIECE >> bit & 1]
    for size in sizes:
        found.add((at, at + size))
        at += size
    return {span for span in found if span[1] <= common}


def reached(spans: set[tuple[int, int]], length: int) -> int:
    """The end of those that follow one another, the longest first, within so many tokens."""
    at = 0
    while ends := [end for start, end in spans if start == at and end <= length]:
        at = max(ends)
    return at


@given(
    prompts=st.lists(st.tuples(st.integers(0, 3 * CHUNK), st.sampled_from([0, 0, 20, 70])), max_size=4),
    length=st.integers(1, 3 * CHUNK),
    tiers=st.sampled_from([[MEMORY], [SHELF], [MEMORY, SHELF]]),
    verb=st.sampled_from(["retrieve", "retrieve_layer", "prefetch"]),
    restart=st.booleans(),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_prompt_finds_what_shorter_ones_left(
    open_engine: Open, prompts: list[tuple[int, int]], length: int, tiers: list[Any], verb: str, restart: bool
) -> None:
    Shelf.shelves.clear()
    engine = open_engine(*tiers)
    spans: set[tuple[int, int]] = set()
    for common, noise in prompts:
        stored(engine, common, noise=noise)
        spans |= kept(common + noise, common)
    if restart and SHELF in tiers:
        engine.close()
        engine = open_engine(*tiers)
    wanted = reached(spans, length)
    assert engine.lookup(TOKENS[:length]).tokens == wanted
    if verb == "prefetch" and MEMORY in tiers:
        engine.prefetch(TOKENS[:length]).result(20)
        assert engine.lookup(TOKENS[:length], ["memory"]) == Hit(wanted, {"memory": wanted} if wanted else {})
        return
    assert retrieved(engine, length, by_layer=verb == "retrieve_layer") == wanted
    assert counted(engine, "retrieved") == wanted
    assert counted(engine, "missed") == length // PIECE * PIECE - wanted


def test_without_tails_only_whole_chunks_are_kept(open_engine: Open) -> None:
    with open_engine(SHELF) as engine:
        stored(engine, CHUNK + 40)
    assert open_engine(SHELF, save_tails=False).lookup(TOKENS[: CHUNK + 40]).tokens == CHUNK
    Shelf.shelves["default"]._blobs.clear()
    other = open_engine(SHELF, save_tails=False)
    stored(other, CHUNK + 40)
    assert other.lookup(TOKENS).tokens == retrieved(other, 3 * CHUNK) == CHUNK
    assert [segment[:2] for segment in other.segments(TOKENS[: CHUNK + 40])] == [(0, CHUNK)]


def test_removing_a_prompt_removes_what_shorter_ones_left_of_it(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF)
    stored(engine, CHUNK + 40)
    stored(engine, CHUNK + 20)
    engine.remove(TOKENS)
    assert engine.lookup(TOKENS[: CHUNK + 40]).tokens == 0 and not Shelf.shelves["default"].blobs


def test_tails_are_removed_also_where_the_setting_is_off_by_now(open_engine: Open) -> None:
    stored(open_engine(SHELF), CHUNK + 40)
    open_engine(SHELF, save_tails=False).remove(TOKENS[: CHUNK + 40])
    assert not Shelf.shelves["default"].blobs


@pytest.mark.parametrize("by_layer", [False, True])
def test_what_was_not_retrieved_can_be_stored(open_engine: Open, by_layer: bool) -> None:
    engine = open_engine(MEMORY)
    stored(engine, CHUNK + 40)
    kv = torch.zeros_like(KV)
    missing = ~engine.retrieve(TOKENS, kv=kv)
    assert int(missing.count_nonzero()) == 2 * CHUNK - 32
    assert not engine.retrieve(TOKENS, missing, kv=kv).any(), "nothing begins there"
    assert not engine.prefetch(TOKENS, missing).result(20).any()
    with engine.retrieve_layer(TOKENS, missing, kv=kv) as loading:
        assert not loading.result().any()
    kv[:, :, missing] = KV[:, :, missing]
    if by_layer:
        with engine.store_layer(TOKENS, missing, kv=kv) as storing:
            for layer in range(SPEC.num_layers):
                storing.layer(layer)
            assert storing.finish() == 2 * CHUNK
    else:
        assert engine.store(TOKENS, missing, kv=kv) == 2 * CHUNK, "with the chunk that it begins within"
    assert retrieved(engine, 3 * CHUNK) == 3 * CHUNK
    for mask in (TOKENS >= CHUNK + 33, (TOKENS >= CHUNK + 32) & (TOKENS != 3 * CHUNK - 1)):
        with pytest.raises(ValueError, match="mask"):
            engine.store(TOKENS, mask, kv=kv)


def test_a_damaged_piece_is_a_miss(open_engine: Open) -> None:
    with open_engine(SHELF) as engine:
        stored(engine, CHUNK + 48)
        last = str(engine.segments(TOKENS[: CHUNK + 48])[-1].key)
    blobs = Shelf.shelves["default"]._blobs
    blobs[last] = blobs[last][:-1] + bytes([blobs[last][-1] ^ 1])
    with open_engine(SHELF) as engine:
        assert retrieved(engine, 3 * CHUNK) == CHUNK + 32
        assert counted(engine, "missed") == 2 * CHUNK - 32


def test_a_piece_is_there_once_every_rank_has_stored_it(open_engine: Open, registry: Registry) -> None:
    def ranked(rank: int) -> KVSpec:
        return KVSpec("tiny", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16", world_size=2, rank=rank)

    config = {"chunk_tokens": CHUNK, "connector": "plain", "tiers": [SHELF]}
    with Engine.open(config, ranked(0), role="index", registry=registry) as index:
        for rank, length, hit in ((0, CHUNK + 40, 0), (1, CHUNK + 20, CHUNK), (1, CHUNK + 40, CHUNK + 32)):
            with open_engine(SHELF, spec=ranked(rank)) as engine:
                stored(engine, length)
            assert index.lookup(TOKENS).tokens == hit


def test_a_request_says_which_pieces_were_taken(open_engine: Open) -> None:
    engine = open_engine(MEMORY, observers=["witness"])
    stored(engine, CHUNK + 48)
    assert retrieved(engine, 3 * CHUNK) == engine.lookup(TOKENS).tokens == CHUNK + 48
    assert retrieved(engine, CHUNK + 48) == CHUNK + 48
    (witness,) = Witness.made
    assert eventually(lambda: len(witness.seen) == 4)
    spans = [(request.verb, [piece[:2] for piece in request.pieces]) for request, _ in witness.seen]
    pieces = [(CHUNK, CHUNK + 32), (CHUNK + 32, CHUNK + 48)]
    assert spans == [("store", []), ("retrieve", pieces), ("lookup", pieces), ("retrieve", [])]
    assert [request.served_tokens for request, _ in witness.seen][1:] == [CHUNK + 48] * 3


def test_a_prefetch_brings_pieces(open_engine: Open) -> None:
    with open_engine(SHELF) as engine:
        stored(engine, CHUNK + 48)
    engine = open_engine(MEMORY, SHELF)
    assert engine.prefetch(TOKENS).result(20).tolist() == [True, False, False]
    assert engine.lookup(TOKENS, ["memory"]) == Hit(CHUNK + 48, {"memory": CHUNK + 48})


@pytest.mark.parametrize("by_layer", [False, True])
def test_pieces_that_are_used_are_not_the_next_to_go(open_engine: Open, by_layer: bool) -> None:
    engine = open_engine(MEMORY)
    stored(engine, CHUNK + 48)
    stored(engine, 0, noise=CHUNK)
    assert retrieved(engine, 3 * CHUNK, by_layer=by_layer) == CHUNK + 48
    assert engine.tiers["memory"].chunks()[0] == engine.segments(-1 - torch.arange(CHUNK))[0].key  # type: ignore[attr-defined]


def test_pieces_are_not_named(open_engine: Open) -> None:
    """An observer would take the removal of one for that of the chunk with the same tokens."""
    stored(open_engine(MEMORY, observers=["watcher"]), CHUNK + 48)
    stored(open_engine(MEMORY, observers=["watcher"]), 48)
    assert eventually(lambda: sum(len(event.keys) for one in Watcher.made for event in one.told) == 5)
    named = [
        [segment[:2] for segment in event.segments] for one in Watcher.made for event in one.told if event.segments
    ]
    assert named == [[(0, CHUNK)]]


def test_both_questions_have_one_deadline(open_engine: Open, hang: Hang) -> None:
    engine = open_engine({**SHELF, "deadline": "20s"})
    Shelf.shelves["default"].before = lambda verb, key: hang(verb, key) if verb == "contains" else None
    began = hang.clock.now()
    assert engine.lookup(TOKENS).tokens == 0
    assert hang.clock.now() - began < 30


@pytest.mark.parametrize("verb", ["lookup", "retrieve", "retrieve_layer"])
def test_a_silent_tier_does_not_use_up_the_time_of_pieces(open_engine: Open, hang: Hang, verb: str) -> None:
    engine = open_engine(SHELF, {**SHELF, "name": "slow", "shelf": "slow", "deadline": "60s"})
    stored(engine, 48)
    Shelf.shelves["slow"].before = lambda verb, key: hang(verb, key) if verb == "contains" else None
    if verb == "lookup":
        assert engine.lookup(TOKENS[:CHUNK]).tokens == 48
    else:
        assert retrieved(engine, CHUNK, by_layer=verb == "retrieve_layer") == 48
    assert counted(engine, "tier_failed", "shelf") == 0


def test_each_tier_of_a_silent_pair_leaves_pieces_their_time(open_engine: Open, hang: Hang) -> None:
    """One is silent about the whole chunk, the other about the pieces; what a third has is read nevertheless."""
    slow = [{**SHELF, "name": name, "shelf": name, "deadline": "60s"} for name in ("slow", "slower")]
    engine = open_engine(SHELF, *slow)
    stored(engine, 48)
    for name in ("slow", "slower"):
        Shelf.shelves[name].before = lambda verb, key: hang(verb, key) if verb == "contains" else None
    assert retrieved(engine, CHUNK) == 48
