"""A replay says what an engine did: the same hits from the same tiers, the same evictions, request by request."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from core_support import CHUNK, SPEC
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import Engine, KVSpec
from kvloom.builtin.dict_backend import DictBackend
from kvloom.config import EngineConfig, resolve
from kvloom.memory import pool
from kvloom.plugins.registry import Registry
from kvloom_tools.replay import Line, Replay, plan_tiers
from kvloom_tools.replay.stack import Sums
from kvloom_tools.replay.trace import Tail, tail_of

BIG = KVSpec(model="tiny", num_layers=2, num_kv_heads=8, head_size=128, dtype="float32")
BIG_CHUNK = 256
"""A chunk of 4 MiB: from there on the pool keeps chunks and blobs in pieces of one length."""
PAGES = {"type": "dict", "deadline": "20s"}


def prompts(
    seed: int, count: int, *, chunk: int, conversations: int, longest: int
) -> Iterator[tuple[torch.Tensor, str]]:
    """Conversations that grow turn by turn, the popular ones more often, of two tenants; some begin alike."""
    rng = random.Random(seed)
    turns: Counter[int] = Counter()
    for _ in range(count):
        which = min(int(rng.paretovariate(0.8)) - 1, conversations - 1)
        turns[which] += 1
        length = min(longest, 1 + turns[which] % (longest + 2)) * chunk + rng.randrange(chunk)
        same = torch.Generator().manual_seed(which % 7)
        own = torch.Generator().manual_seed(1000 + which)
        tokens = torch.randint(0, 1000, (length,), generator=own)
        tokens[: 2 * chunk] = torch.randint(0, 1000, (2 * chunk,), generator=same)[:length]
        yield tokens, "ab"[which % 2]


def replayed(config: dict[str, Any], spec: KVSpec) -> Replay:
    loaded = EngineConfig.load(config)
    plans = plan_tiers(resolve(loaded, Registry.discover()), chunk_tokens=loaded.chunk_tokens, spec=spec)
    tenants = {"a": 0, "b": 1}
    return Replay(plans, chunk_tokens=loaded.chunk_tokens, tenants=tenants, save_tails=loaded.save_tails)


def traced(engine: Engine, tokens: torch.Tensor, salt: str, numbers: dict[bytes, int]) -> tuple[list[int], Tail | None]:
    """The chunks of a prompt and its tail, as a trace has them; others' pieces whether an engine would find them."""
    chunk = engine.chunk_tokens
    segments = engine.segments(tokens, salt=salt)
    whole = sum(segment.end - segment.start == chunk for segment in segments)
    pieces = segments[whole:]
    where = engine.locate(segments)
    if None in where:
        pieces += engine._tokens.pieces(tokens, segments[where.index(None)].start, salt=salt)
    ids = {segment: numbers.setdefault(segment.key.digest, len(numbers)) for segment in (*segments, *pieces)}
    found = [(piece.start, piece.end, ids[piece]) for piece in pieces]
    return [ids[one] for one in segments[:whole]], tail_of(found, whole * chunk, chunk) if pieces else None


def compare(
    config: dict[str, Any], spec: KVSpec, *, count: int, conversations: int, longest: int, seed: int, within: float = 0
) -> Replay:
    """Run both, and compare after every request which chunks came from where, and in the end what was counted.

    within: by which part of all hits the sums may differ; then single requests may, too.
    """
    replay = replayed(config, spec)
    chunk = replay.chunk_tokens
    kv = torch.zeros(spec.blob_shape((longest + 1) * chunk), dtype=spec.torch_dtype)
    numbers: dict[bytes, int] = {}
    expected: Counter[str] = Counter()
    with Engine.open(config, spec) as engine:
        for at, (tokens, salt) in enumerate(
            prompts(seed, count, chunk=chunk, conversations=conversations, longest=longest)
        ):
            ids, tail = traced(engine, tokens, salt, numbers)
            before, before_pieces = Counter(replay.sums.hit_chunks), Counter(replay.sums.hit_pieces)
            forecast = engine.lookup(tokens, salt=salt).by_tier
            got = int(engine.retrieve(tokens, kv=kv, salt=salt).count_nonzero())
            assert engine.flush(20)
            assert got == sum(forecast.values())
            line = Line(at, tokens.numel(), ids, chunk, "retrieve", "ab".index(salt), tail=tail)
            replay.feed(line)
            hits = Sums(
                hit_chunks=replay.sums.hit_chunks - before, hit_pieces=replay.sums.hit_pieces - before_pieces
            ).hit_tokens(chunk)
            assert within or hits == forecast, f"request {at}"
            if at % 3:  # what is only retrieved shows what promotion alone does
                engine.store(tokens, kv=kv, salt=salt)
                assert engine.flush(20)
                replay.feed(line._replace(verb="store"))
            expected.update(forecast)
        evicted: Counter[tuple[str, str]] = Counter()
        for key, totals in engine.counters().items():
            if key.name == "evicted":
                evicted[key.tier, key.reason] += totals.chunks
        health = engine.health()
    if within:
        ours_tokens = replay.sums.hit_tokens(chunk)
        print(ours_tokens, expected)
        for name, there in expected.items():
            assert ours_tokens[name] == pytest.approx(there, abs=within * sum(expected.values()))
        return replay
    for tier in health.tiers:
        ours = replay.memory if tier.name == "memory" else next(t for t in replay.stored if t.plan.name == tier.name)
        assert ours is not None
        assert (len(ours), ours.used) == (tier.blobs, tier.bytes), tier.name
        for reason in ("capacity", "quota"):
            named = evicted[tier.name, reason] + (evicted[tier.name, ""] if reason == "capacity" else 0)
            assert ours.evicted[reason] == named, (tier.name, reason)
    return replay


def small(*tiers: dict[str, Any] | str, chunk: int = CHUNK) -> dict[str, Any]:
    """Chunks of 4 tokens have no pieces."""
    return {"chunk_tokens": chunk, "tiers": list(tiers)}


CONFIGS = {
    "memory": small({"type": "memory", "capacity": "80KiB"}),
    "memory with quotas": small({"type": "memory", "capacity": "120KiB", "quota": {"a": "40KiB", "*": "60KiB"}}),
    "one tier": small({**PAGES, "capacity": "200KiB"}),
    "two tiers": small({**PAGES, "name": "near", "capacity": "100KiB"}, {**PAGES, "name": "far", "capacity": "400KiB"}),
    "a memory shorter than a prompt": small({"type": "memory", "capacity": "20KiB"}),
    "a quota of memory shorter than a prompt": small(
        {"type": "memory", "capacity": "120KiB", "quota": {"a": "16KiB", "*": "60KiB"}}
    ),
    "a tier shorter than a prompt": small({**PAGES, "capacity": "40KiB"}),
    "a quota shorter than a prompt": small({**PAGES, "capacity": "300KiB", "quota": {"a": "32KiB", "*": "160KiB"}}),
    "tiny_lfu": small({**PAGES, "capacity": "200KiB", "policy": "tiny_lfu"}),
    "quotas": small({**PAGES, "capacity": "300KiB", "quota": {"a": "100KiB", "*": "160KiB"}}),
    # Pieces of one page in memory; of two or three in a tier, where a chunk takes five.
    "pieces in memory": small({"type": "memory", "capacity": "160KiB"}, chunk=64),
    "pieces in memory with quotas": small(
        {"type": "memory", "capacity": "240KiB", "quota": {"a": "80KiB", "*": "120KiB"}}, chunk=64
    ),
    "pieces in a tier": small({**PAGES, "capacity": "600KiB"}, chunk=256),
    "pieces in two tiers": small(
        {**PAGES, "name": "near", "capacity": "500KiB"}, {**PAGES, "name": "far", "capacity": "1400KiB"}, chunk=256
    ),
    "pieces with quotas": small({**PAGES, "capacity": "900KiB", "quota": {"a": "300KiB", "*": "500KiB"}}, chunk=256),
    "pieces with tiny_lfu": small({**PAGES, "capacity": "600KiB", "policy": "tiny_lfu"}, chunk=256),
    "pieces, and a tier shorter than a prompt": small({**PAGES, "capacity": "120KiB"}, chunk=256),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_replay_gives_what_the_engine_gave(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of a chain for which a tier has no room, several threads write some chunks that then have to go: how many depends
    # on which thread is first. With one the engine does what the replay counts. So of pieces, which are written sooner.
    if "shorter than a prompt" in name or "pieces" in name:
        monkeypatch.setattr(DictBackend, "threads", 1)
    replay = compare(CONFIGS[name], SPEC, count=150, conversations=40, longest=8, seed=seed)
    assert 0.1 < sum(replay.sums.hit_chunks.values()) / replay.sums.asked_chunks < 0.9, "neither all hits nor none"
    assert any(tier.evicted for tier in (replay.memory, *replay.stored) if tier is not None)
    assert bool(replay.sums.hit_pieces) == ("pieces" in name)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Memory, or one or two stored tiers, from less than a prompt to more than all of them; a chunk takes 4 or 8 KiB.

    With tails a chunk takes as much as a piece in memory, and half as much again in a tier.

    Of two, none is shorter than a prompt, and the first takes all that comes up: what a policy says to several chunks
    at once hangs on how many of them were written by then.
    """

    def tier(*, least: int = 2, **fixed: Any) -> dict[str, Any]:
        pages = draw(st.integers(least, 80))
        salts = draw(st.sets(st.sampled_from(["a", "b", "*"])))
        quota = {salt: f"{8 * draw(st.integers(least, pages))}KiB" for salt in sorted(salts)}
        return {**fixed, "capacity": f"{8 * pages}KiB", **({"quota": quota} if quota else {})}

    tails = draw(st.booleans())
    if draw(st.booleans()):
        return small(tier(type="memory"), chunk=64 if tails else CHUNK)
    chunk = 128 if tails else CHUNK
    policy = draw(st.sampled_from(["lru", "tiny_lfu"]))
    if draw(st.booleans()):
        return small(tier(**PAGES, policy=policy), chunk=chunk)
    least = 15 if tails else 10
    far = tier(**PAGES, name="far", policy=policy, least=least)
    return small(tier(**PAGES, name="near", least=least), far, chunk=chunk)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=configurations(), seed=st.integers(0, 1 << 16), conversations=st.integers(2, 40))
def test_whatever_the_tiers_are(
    config: dict[str, Any], seed: int, conversations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DictBackend, "threads", 1)
    compare(config, SPEC, count=60, conversations=conversations, longest=8, seed=seed)


def large(*tiers: dict[str, Any]) -> dict[str, Any]:
    """Without tails: pieces beside large chunks leave gaps in the pool that a replay does not know of."""
    memory = {"type": "memory", "capacity": "160MiB"}
    return {"chunk_tokens": BIG_CHUNK, "tiers": [memory, *tiers], "save_tails": False}


LARGE = {
    "disk": {"type": "disk", "capacity": "240MiB", "deadline": "60s"},
    "disk, when memory lets go": {"type": "disk", "capacity": "240MiB", "write": "on_evict", "deadline": "60s"},
}


@pytest.mark.parametrize(("name", "tails"), [("disk", False), ("disk, when memory lets go", False), ("disk", True)])
def test_a_replay_gives_what_an_engine_with_memory_and_disk_gave(
    name: str, tails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a quarter of the size: a chunk of 1 MiB is large. The slow test below has the sizes that engines have."""
    for constant in ("_LARGE_BYTES", "_HEADROOM_BYTES"):
        monkeypatch.setattr(pool, constant, getattr(pool, constant) // 4)
    memory, disk = (
        {"type": "memory", "capacity": "40MiB"},
        {**LARGE[name], "path": str(tmp_path), "capacity": "60MiB"},
    )
    config = {"chunk_tokens": BIG_CHUNK // 4, "tiers": [memory, disk], "save_tails": tails}
    # What is being written to the disk cannot go from memory just then, so that something else goes: with `on_evict` it
    # depends on how fast the disk is. Pieces beside chunks leave gaps in the pool that a replay does not know of.
    within = 0.02 if "write" in LARGE[name] else 0.03 if tails else 0
    replay = compare(config, BIG, count=340, conversations=60, longest=6, seed=1, within=within)
    assert replay.sums.hit_chunks["memory"] > 100 and replay.sums.hit_chunks["disk"] > 30
    assert replay.memory is not None and replay.memory.evicted and replay.stored[0].evicted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "disk", "longest", "within"),
    [
        ("136MiB", "600MiB", 34, 0), ("150MiB", "300MiB", 30, 0), ("132MiB", "200MiB", 6, 0),
        ("100MiB", "240MiB", 6, 0.05), ("24MiB", "200MiB", 6, 0.05),
    ],
)  # fmt: skip
def test_a_replay_is_right_for_prompts_longer_than_memory_and_close_where_few_chunks_fit(
    memory: str, disk: str, longest: int, within: float, tmp_path: Path
) -> None:
    """Below 32 chunks the pool has gaps that a replay does not know of."""
    config = large({**LARGE["disk"], "path": str(tmp_path), "capacity": disk})
    config["tiers"][0]["capacity"] = memory
    compare(config, BIG, count=120, conversations=12 if longest > 6 else 30, longest=longest, seed=1, within=within)


def test_what_a_request_is_still_to_get_from_memory_does_not_go_for_what_comes_up() -> None:
    replay = replayed(large({**PAGES, "capacity": "600MiB"}), BIG)
    memory = replay.memory
    assert memory is not None
    head, middle, tail = list(range(20)), list(range(100, 125)), list(range(200, 219))

    def feed(ids: list[int], verb: str) -> dict[str, int]:
        before = Counter(replay.sums.hit_chunks)
        replay.feed(Line(0, len(ids) * BIG_CHUNK, ids, BIG_CHUNK, verb, 0))
        return dict(Counter(replay.sums.hit_chunks) - before)

    for part in (middle, head, tail):
        feed(part, "store")
    assert set(memory.order) == {*head, *tail}, "it has room for 39 chunks"
    for chunk in head:
        memory._remove(chunk, "capacity")
    assert feed([*head, *middle, *tail], "retrieve") == {"memory": len(tail), "dict": len(head) + len(middle)}
