"""Serving is forgiving: whatever a store does, retrieve gives verified KV or says False, and goes on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest
import torch
from clock_support import Hang
from core_support import Shelf, eventually, kv_of, matches, tokens_of
from faults_support import (
    DAMAGE,
    KV,
    MEMORY,
    SHELF,
    TOKENS,
    Open,
    chunk_names,
    count,
    filled,
    later_version,
    misses,
    retrieve,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import BackendError, Sink, envelope
from kvloom.memory import pages_of


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("at", [0, 2])
def test_a_damaged_blob_is_a_counted_miss_and_is_replaced(
    open_engine: Open, damage: Callable[[bytes, bytes], bytes], at: int
) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    names = chunk_names(engine)
    shelf._blobs[names[at]] = damage(shelf._blobs[names[at]], shelf._blobs[names[3 - at]])
    assert retrieve(engine) == [True] * at + [False] * (4 - at)
    assert count(engine, "corrupt") == 1 and misses(engine) == {"corrupt": 1, "behind a miss": 3 - at}
    assert names[at] not in shelf._blobs, "what is corrupt is removed"
    engine.store(TOKENS, kv=KV)
    assert engine.flush(20)
    assert retrieve(open_engine(SHELF)) == [True] * 4


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_storing_over_a_damaged_header_mends_it_without_a_retrieve(
    open_engine: Open, damage: Callable[[bytes, bytes], bytes]
) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    names = chunk_names(engine)
    good = shelf._blobs[names[1]]
    shelf._blobs[names[1]] = damage(good, shelf._blobs[names[2]])
    engine.store(TOKENS, kv=KV)
    assert engine.flush(20)
    header_was_bad = damage(good, shelf._blobs[names[2]])[:4096] != good[:4096]
    mended = len(shelf._blobs[names[1]]) == len(good) and shelf._blobs[names[1]][4096:] == good[4096:]
    assert mended and envelope.unseal(shelf._blobs[names[1]], key=names[1]) if header_was_bad else not mended


def test_a_blob_that_reads_badly_once_is_read_again(open_engine: Open) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    name = chunk_names(engine)[1]
    good, reads = shelf._blobs[name], []

    def flicker(verb: str, key: str) -> None:
        if verb == "get" and key == name:
            reads.append(key)
            shelf._blobs[name] = good[:-1] + b"\0" if len(reads) == 1 else good

    Shelf.shelves["default"].before = flicker
    assert retrieve(engine) == [True] * 4 and len(reads) == 2 and count(engine, "corrupt") == 0


def test_a_later_version_is_a_miss_and_stays(open_engine: Open) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    name = chunk_names(engine)[1]
    shelf._blobs[name] = later_version(shelf._blobs[name])
    assert retrieve(engine) == [True, False, False, False]
    assert count(engine, "corrupt") == 0
    assert {reason.partition(":")[0] for reason in misses(engine)} == {"unreadable", "behind a miss"}
    assert name in shelf._blobs


@pytest.mark.parametrize(
    "change", [{"dtype": "float16"}, {"shape": (2, 2, 2, 16)}, {"format": "kv_pages"}, {"num_tokens": 3}], ids=str
)
def test_a_blob_of_another_shape_under_the_right_key_is_corrupt(open_engine: Open, change: dict[str, object]) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    name = chunk_names(engine)[1]
    header, payload = envelope.unseal(shelf._blobs[name], key=name)
    shelf._blobs[name] = b"".join(envelope.seal(header.description._replace(**change), [payload]))
    assert retrieve(engine) == [True, False, False, False]
    assert count(engine, "corrupt") == 1


def test_a_blob_that_vanishes_between_lookup_and_retrieve(open_engine: Open) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    assert engine.lookup(TOKENS).tokens == 16
    del shelf._blobs[chunk_names(engine)[2]]
    assert retrieve(engine) == [True, True, False, False]
    assert engine.lookup(TOKENS).tokens == 8, "and the forecast has learnt"


@pytest.mark.parametrize("verb", ["get", "put", "contains", "delete"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("odd"), MemoryError()])
def test_a_store_that_raises_is_a_miss(open_engine: Open, verb: str, error: Exception) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)

    def fail(called: str, key: str) -> None:
        if called == verb:
            raise error

    shelf = Shelf.shelves["default"]
    shelf.before = fail
    got = retrieve(engine)
    assert got == [verb not in ("get", "contains")] * 4
    more, kv = tokens_of(16, 9), kv_of(16, 9)
    engine.store(more, kv=kv)
    assert engine.flush(20)
    with pytest.raises(BackendError) if verb == "delete" else contextlib.nullcontext():
        engine.remove(TOKENS)
    shelf.before = lambda *_: None
    back = torch.zeros_like(kv)
    assert engine.retrieve(more, kv=back).all() and torch.equal(back, kv), "memory serves on"
    assert count(engine, "tier_error") + count(engine, "dropped") > 0, "nothing fails unseen"


def test_the_kth_call_that_fails_never_gives_wrong_kv(open_engine: Open) -> None:
    """SQLite's way: fail at call 1, 2, 3 ... until a run gets through without a fault."""
    for k in range(1, 200):
        Shelf.shelves.clear()
        engine = open_engine({"type": "memory", "capacity": "16KiB"}, SHELF)
        calls = 0

        def fail(verb: str, key: str, k: int = k) -> None:
            nonlocal calls
            calls += 1
            if calls == k:
                raise OSError(5, "Input/output error")

        Shelf.shelves["default"].before = fail
        engine.store(TOKENS, kv=KV)
        assert engine.flush(20)
        retrieve(engine)
        engine.store(TOKENS, kv=KV)
        assert engine.flush(20)
        assert retrieve(engine) == [True] * 4
        engine.close()
        if calls < k:
            return
    pytest.fail("never got through without a fault")


@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_whatever_gives_wrong_kv(open_engine: Open, data: st.DataObject) -> None:
    Shelf.shelves.clear()
    shelf = filled(open_engine)
    with open_engine(SHELF) as engine:
        names = chunk_names(engine)
        for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
            blob = bytearray(shelf._blobs[name])
            for at in data.draw(st.lists(st.integers(0, len(blob) - 1), max_size=3)):
                blob[at] ^= data.draw(st.integers(1, 255))
            shelf._blobs[name] = bytes(blob[: data.draw(st.integers(0, len(blob)))])
        retrieve(engine)


def test_a_question_with_a_limit_ends_by_it_and_judges_no_tier(open_engine: Open, hang: Hang) -> None:
    engine = open_engine(MEMORY, SHELF | {"deadline": "200s"})
    engine.store(TOKENS[:4], kv=KV[:, :, :4])
    assert engine.flush(20)
    Shelf.shelves["default"].before = lambda verb, key: hang(verb, key) if verb == "contains" else None
    there, *lacking = engine.segments(TOKENS)
    for _ in range(3):  # more than there are threads for questions
        assert engine.find(lacking, timeout=10).tolist() == [False] * 3
    assert engine.locate([there, *lacking], timeout=10) == ["memory", None, None, None]
    assert hang.waiting == 2 and count(engine, "tier_error") == 0 == count(engine, "tier_paused")
    assert engine.find(lacking).tolist() == [False] * 3 and count(engine, "tier_error") == 1, "the tier's own deadline"


def test_hanging_reads_end_at_the_deadline_and_are_bounded(open_engine: Open, hang: Hang) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    shelf = Shelf.shelves["default"]
    # A probe has a thread besides those for reads, and the clock decides whether there is one.
    shelf.before = lambda verb, key: hang(verb, key) if verb == "get" and not key.startswith("probe-") else None
    for _ in range(6):
        assert retrieve(engine) == [False] * 4
    tier = engine.tiers["shelf"]
    assert eventually(lambda: hang.waiting == tier.abandoned_calls), "a call that is given up may be on its way there"
    assert tier.abandoned_calls <= shelf.threads, "no more threads than the tier has"
    assert count(engine, "tier_paused") >= 1
    other, kv = tokens_of(8, 5), kv_of(8, 5)
    engine.store(other, kv=kv)
    assert engine.lookup(other, ["memory"]).tokens == 8, "serving goes on"
    hang.open()
    assert eventually(lambda: not tier.abandoned_calls)
    shelf.before = lambda *_: None
    hang.clock.skip(60)  # whatever it is paused for
    until = time.monotonic() + 20
    while not engine.health().ok and time.monotonic() < until:
        engine.lookup(TOKENS)
    while retrieve(engine) != [True] * 4:
        assert time.monotonic() < until, "the tier is back"


def test_a_late_read_never_lands_in_memory_that_has_a_new_owner(open_engine: Open, hang: Hang) -> None:
    filled(open_engine)
    engine = open_engine({"type": "memory", "capacity": "16KiB"}, SHELF)
    Shelf.shelves["default"].before = lambda verb, key: hang(verb, key) if verb == "get" else None
    assert retrieve(engine) == [False] * 4
    mine = [tokens_of(16, seed) for seed in range(20, 24)]
    for seed, tokens in zip(range(20, 24), mine, strict=True):
        engine.store(tokens, kv=kv_of(16, seed))
    hang.open()
    assert eventually(lambda: not engine.tiers["shelf"].abandoned_calls)
    for seed, tokens in zip(range(20, 24), mine, strict=True):
        got = torch.zeros_like(KV)
        mask = engine.retrieve(tokens, kv=got)
        assert matches(got, kv_of(16, seed), mask)


def test_hanging_writes_never_hold_the_caller_past_its_deadline(open_engine: Open, hang: Hang) -> None:
    engine = open_engine({"type": "memory", "capacity": "32KiB"}, SHELF)
    shelf = Shelf.shelves["default"]
    shelf.before = lambda verb, key: hang(verb, key) if verb == "put" and not key.startswith("spec") else None
    for seed in range(30, 36):
        engine.store(tokens_of(16, seed), kv=kv_of(16, seed))
    engine.flush(5)
    assert hang.waiting <= 2
    assert count(engine, "dropped") > 0
    hang.open()
    assert eventually(lambda: not engine.tiers["shelf"].abandoned_calls)
    for seed in range(30, 36):
        got = torch.zeros_like(KV)
        mask = engine.retrieve(tokens_of(16, seed), kv=got)
        assert matches(got, kv_of(16, seed), mask)
    hang.clock.skip(60)
    until = time.monotonic() + 20
    while engine.lookup(TOKENS, ["shelf"]).tokens < 16:
        assert time.monotonic() < until, "writing goes on"
        engine.store(TOKENS, kv=KV)
        assert engine.flush(20)


def test_capacity_holds_and_tails_go_before_heads(open_engine: Open) -> None:
    engine = open_engine(SHELF | {"capacity": f"{8 * 6}KiB"})
    shelf = Shelf.shelves["default"]
    for seed in range(40, 45):
        engine.store(tokens_of(16, seed), kv=kv_of(16, seed))
        assert engine.flush(20)
        assert eventually(lambda: len(shelf.blobs) <= 6)  # a deletion that is late is not waited for
    assert engine.lookup(tokens_of(16, 44)).tokens == 16
    assert engine.lookup(tokens_of(16, 43)).tokens == 8, "half of the older prompt: its head"
    assert count(engine, "evicted") > 0
    open_engine(SHELF | {"capacity": 5 * pages_of(max(map(len, shelf.blobs.values())))})
    assert eventually(lambda: len(shelf.blobs) <= 5) and len(shelf.blobs) == 5, "the bound holds after a restart"


def test_a_read_that_begins_anew_gives_back_the_memory_it_had(open_engine: Open) -> None:
    filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    shelf = Shelf.shelves["default"]

    def get_into(key: str, sink: Sink) -> bool:
        sink.reserve(len(shelf.blobs[key]))[:2] = b"ab"  # and then the connection is lost
        return Shelf.get_into(shelf, key, sink)

    shelf.get_into = get_into  # type: ignore[method-assign]
    assert retrieve(engine) == [True] * 4
    assert not engine._stack.memory.pool.leaked


def test_two_engines_on_one_store_share_their_hits(open_engine: Open) -> None:
    one, two = open_engine(MEMORY, SHELF), open_engine(MEMORY, SHELF)
    one.store(TOKENS, kv=KV)
    assert one.flush(20)
    assert retrieve(two) == [True] * 4


@pytest.mark.parametrize("serializer", ["raw", "signs"])
def test_the_expected_length_is_that_of_the_plain_blob_before(
    open_engine: Open, serializer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoded blobs differ in length: to expect one of them would be to read most of them twice."""
    told: list[tuple[int, int]] = []
    read = Shelf.get_into

    def get_into(self: Shelf, key: str, sink: Sink) -> bool:
        told.append((sink.expected_bytes, len(self.blobs[key])))  # type: ignore[attr-defined]
        return read(self, key, sink)

    monkeypatch.setattr(Shelf, "get_into", get_into)
    tier = SHELF | {"serializer": serializer}
    filled(open_engine, tier)
    with open_engine(tier) as engine:
        for _ in range(2):
            engine.retrieve(TOKENS, kv=torch.zeros_like(KV))
    again = told[4:]
    assert told[0][0] == 0 and len(again) == 4
    assert [expected for expected, _ in again] == [actual if serializer == "raw" else 0 for _, actual in again]
