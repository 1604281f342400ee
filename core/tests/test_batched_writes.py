"""Chunks that are written many at once: each has the outcome that it would have had alone."""

from __future__ import annotations

import base64
import errno
import threading
from collections.abc import Callable

import pytest
from clock_support import Hang, SkippingClock
from core_support import CHUNK_BYTES, Crate, Gate, Shelf, eventually, kv_of, tokens_of
from faults_support import TOKENS, Open, chunk_names, count, retrieve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import Engine, StorageBackend, WriteDone

CRATE = {"type": "crate", "deadline": "20s"}
PLUG = tokens_of(4, 99), kv_of(4, 99)
"""A chunk whose write the others wait behind."""
BLOB_BYTES = 8192
"""Size of a blob in the store: a page of header, and a chunk."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Crate, "threads", 1)


def crate() -> Crate:
    found = Shelf.shelves["default"]
    assert isinstance(found, Crate)
    return found


def store(
    engine: Engine, before: Callable[[str, str], object] = lambda verb, key: None, chunks: int = 4, seconds: float = 60
) -> bool:
    """Have chunks written that wait behind another write. before: what the store does from then on."""
    queue, gate, shelf = engine._stack.stored[0]._writes, Gate(), Shelf.shelves["default"]
    shelf.before = lambda verb, key: gate(verb, key) if verb == "put" and key in plug(engine) else None
    engine.store(PLUG[0], kv=PLUG[1])
    gate.reached()
    engine.store(tokens_of(4 * chunks), kv=kv_of(4 * chunks))
    assert eventually(lambda: queue.waiting_bytes == (1 + chunks) * CHUNK_BYTES)
    shelf.before = lambda verb, key: before(verb, key) and None
    gate.open()
    return engine.flush(seconds)


def failing(*keys: str, verb: str = "put", error: Callable[[], Exception] = OSError) -> Callable[[str, str], None]:
    def before(at: str, key: str) -> None:
        if at == verb and key in keys:
            raise error()

    return before


def lost(engine: Engine) -> dict[str, int]:
    counters = engine.counters().items()
    return {key.reason: totals.chunks for key, totals in counters if key.name == "dropped" and key.tier == "crate"}


def test_writes_that_wait_are_put_by_one_call(open_engine: Open) -> None:
    engine = open_engine(CRATE)
    assert store(engine)
    assert crate().puts == [chunk_names(engine)], "and what nobody waited for was put alone"
    assert retrieve(open_engine(CRATE)) == [True] * 4


@pytest.mark.parametrize("mode", ["sign", "encrypt"])
def test_each_blob_of_a_batch_is_protected_by_itself(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("KEYS_OF_BLOBS", base64.b64encode(bytes(range(32))).decode())
    ours = CRATE | {"protect": {"mode": mode, "keys": "env:KEYS_OF_BLOBS"}}
    engine = open_engine(ours)
    assert store(engine)
    assert crate().puts == [chunk_names(engine)]
    assert retrieve(open_engine(ours)) == [True] * 4


def test_a_batch_is_as_long_as_keeps_every_thread_busy(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.tiers.stored.write_queue.LEAST_BATCH_BYTES", 2 * BLOB_BYTES)
    monkeypatch.setattr("kvloom.tiers.stored.tier.MOST_BATCH_BYTES", 3 * BLOB_BYTES)
    engine = open_engine(CRATE)
    monkeypatch.setattr("kvloom.tiers.stored.write_queue.WriteQueue._bytes", 10**9, raising=False)
    assert store(engine, chunks=10)
    assert [len(batch) for batch in crate().puts] == [2] * 5, "they are few"


def test_a_batch_is_a_small_part_of_what_a_bound_allows(open_engine: Open) -> None:
    engine = open_engine(CRATE | {"capacity": 24 * BLOB_BYTES, "quota": {"*": 16 * BLOB_BYTES}})
    assert store(engine, chunks=7)
    assert [len(batch) for batch in crate().puts] == [2, 2, 2]


FAILS = ("fails", "fails and is told of twice", "removed and fails")
KINDS = ("", *FAILS, "is not told of", "is there and fails", "removed")


@given(kinds=st.lists(st.sampled_from(KINDS), min_size=4, max_size=4))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_write_of_a_batch_is_stored_or_lost_alone(open_engine: Open, kinds: list[str]) -> None:
    Shelf.shelves.clear()
    with open_engine(CRATE) as engine:
        names = chunk_names(engine)
        kind_of = dict(zip(names, kinds, strict=True))
        tier, keys = engine._stack.stored[0], [segment.key for segment in engine.segments(TOKENS)]

        def before(verb: str, key: str) -> None:
            kind = kind_of.get(key, "")
            if verb == "put" and "removed" in kind:
                with engine._stack.memory.invalidations.removing([keys[names.index(key)]]):
                    pass
            if verb == "put" and kind in FAILS:
                raise OSError("no route")

        def outcomes(key: str, outcome: Exception | None) -> list[Exception | None]:
            kind = kind_of.get(key, "")
            if kind == "is not told of":
                return []
            if kind == "is there and fails":
                return [OSError("no answer")]
            return [outcome, None] if "twice" in kind else [outcome]

        crate().outcomes = outcomes
        assert store(engine, before)
        assert [len(batch) for batch in crate().puts] == [4]
        there = [kind in ("", "is not told of", "is there and fails") for kind in kinds]
        assert [name in crate().blobs for name in names] == there
        assert tier.find(keys) == there, "what is known here"
        errors = sum(kind not in ("", "removed") for kind in kinds)
        assert sum(lost(engine).values()) == 4 - kinds.count("")
        assert lost(engine).get("removed while it was being written", 0) == kinds.count("removed")
        assert count(engine, "tier_error") == min(1, errors), "one call failed, and that is known once it is flushed"
        assert tier.ledger.bytes == BLOB_BYTES * len(crate().blobs)
        assert not tier._writer.doomed()


def test_a_failure_is_counted_before_those_who_wait_for_the_write_hear_of_it(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(CRATE)
    tier = engine._stack.stored[0]
    waiting: list[int] = []
    monkeypatch.setattr(tier.calls, "failed", lambda *failure: waiting.append(tier._writes.waiting_bytes))
    assert store(engine, failing(*chunk_names(engine)[:2]))
    assert waiting == [2 * CHUNK_BYTES]


def test_a_batch_that_breaks_off_loses_what_is_not_there(open_engine: Open) -> None:
    engine = open_engine(CRATE)
    names = chunk_names(engine)
    crate()._blobs[names[0]] = b"already there"  # so that the store says so when it is asked
    assert store(engine, failing(names[1], verb="batch"))  # it goes from the last to the first
    assert lost(engine) == {"write failed: OSError": 2}
    assert count(engine, "tier_error") == 1
    tier = engine._stack.stored[0]
    assert tier.find([segment.key for segment in engine.segments(TOKENS)]) == [True, False, True, True]


def test_a_batch_that_fails_is_one_failure(open_engine: Open) -> None:
    engine = open_engine(CRATE)
    store(engine, failing(*chunk_names(engine)))
    assert eventually(lambda: engine._stack.stored[0].calls.writing.failures == 1)
    assert engine.health().ok


def test_writes_into_a_store_without_batches_are_judged_each(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shelf, "threads", 1)
    engine = open_engine({"type": "shelf", "deadline": "20s"})
    assert store(engine, failing(*chunk_names(engine)))
    assert eventually(lambda: engine._stack.stored[0].calls.writing.failures == 4)


def test_what_was_put_before_a_batch_began_to_hang_is_stored(open_engine: Open, hang: Hang) -> None:
    engine = open_engine(CRATE)
    names = chunk_names(engine)
    assert store(engine, lambda verb, key: hang(verb, key) if (verb, key) == ("batch", names[1]) else None)
    assert lost(engine) == {"deadline": 2} and sorted(crate().blobs) == sorted([*names[2:], *plug(engine)])
    health = engine.health().tiers[-1]
    assert (health.abandoned_calls, health.waiting_bytes) == (1, 0), "one thread hangs, not one for each chunk"
    hang.open()
    assert eventually(lambda: len(crate().blobs) == 5), "it goes on with what it has begun"
    assert eventually(lambda: len(engine._stack.stored[0].ledger) == 5)


def test_a_slow_store_that_goes_on_is_not_a_silent_one(open_engine: Open, skipping: SkippingClock) -> None:
    engine = open_engine(CRATE | {"deadline": "1h"})
    queue = engine._stack.stored[0]._writes

    def before(verb: str, key: str) -> None:
        if verb == "batch":
            skipping.skip(2400.0)
            assert not queue.stuck

    assert store(engine, before, seconds=1e6)
    assert not lost(engine) and len(crate().blobs) == 5


def test_what_is_removed_amid_a_batch_stays_removed(open_engine: Open) -> None:
    engine = open_engine(CRATE)
    names, gate = chunk_names(engine), Gate()
    stored = threading.Thread(
        target=store, args=(engine, lambda verb, key: gate(verb, key) if (verb, key) == ("batch", names[1]) else None)
    )
    stored.start()
    gate.reached()
    removed = threading.Thread(target=engine.remove, args=(TOKENS,))
    removed.start()
    under_way = engine._stack.memory.invalidations
    assert eventually(lambda: bool(under_way._under_way))
    assert engine.lookup(TOKENS).tokens == 0
    gate.open()
    removed.join(60)
    stored.join(60)
    assert sorted(crate().blobs) == sorted(plug(engine))


def test_a_close_amid_a_batch_loses_what_has_not_come(open_engine: Open, hang: Hang) -> None:
    engine = open_engine(CRATE)
    names = chunk_names(engine)
    stored = threading.Thread(
        target=store, args=(engine, lambda verb, key: hang(verb, key) if (verb, key) == ("batch", names[1]) else None)
    )
    stored.start()
    hang.reached()
    engine.close()
    stored.join(60)
    assert sum(lost(engine).values()) == 2
    hang.open()
    assert eventually(lambda: engine._stack.stored[0].calls.abandoned == 0)
    assert retrieve(open_engine(CRATE)) == [True] * 4, "what it had begun to write is whole"


def test_a_store_that_is_full_in_the_middle_of_a_batch_gets_room(open_engine: Open) -> None:
    engine = open_engine(CRATE | {"capacity": 80 * BLOB_BYTES})
    engine.store(tokens_of(32, 5), kv=kv_of(32, 5))
    assert engine.flush(60)

    def before(verb: str, key: str) -> None:
        if verb == "put" and len(crate().blobs) > 10:
            raise OSError(errno.ENOSPC, "no space left on device")

    assert store(engine, before)
    assert retrieve(open_engine(CRATE)) == [True] * 4 and not lost(engine)
    assert engine._stack.stored[0].ledger.bytes == BLOB_BYTES * len(crate().blobs)


@pytest.mark.parametrize("fails", [False, True])
def test_the_victims_of_a_batch_are_deleted_by_one_call(open_engine: Open, fails: bool) -> None:
    engine = open_engine(CRATE | {"capacity": 32 * BLOB_BYTES})
    old = tokens_of(4 * 30, 5)
    engine.store(old, kv=kv_of(4 * 30, 5))
    assert engine.flush(60)
    crate().puts.clear()
    calls: list[tuple[str, str]] = []

    def before(verb: str, key: str) -> None:
        calls.append((verb, key))
        if verb == "delete_many" and fails:
            raise OSError("no route")

    assert store(engine, before)
    deletes = [len(key.split()) for verb, key in calls if verb == "delete_many"]
    assert deletes[0] == 3 and (fails or deletes == [3])
    assert [len(batch) for batch in crate().puts] == [1 if fails else 4]
    tier = engine._stack.stored[0]
    assert eventually(lambda: tier.ledger.bytes == BLOB_BYTES * len(crate().blobs))
    assert sum(lost(engine).values()) == (3 if fails else 0)
    assert tier.ledger.bytes <= 32 * BLOB_BYTES


def test_what_is_reported_after_a_batch_has_returned_is_nobodys(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    later: list[WriteDone] = []
    monkeypatch.setattr(Crate, "put_many", lambda self, requests, done: later.append(done))
    engine = open_engine(CRATE)
    assert store(engine) and lost(engine) == {"write failed: BackendError": 4}
    for number in range(4):
        later[0](number, None)
    tier = engine._stack.stored[0]
    assert len(tier.ledger) == 1 and not any(tier.find([segment.key for segment in engine.segments(TOKENS)]))


def test_the_default_tells_of_each_request(open_engine: Open) -> None:
    shelf = Shelf(Shelf.Config())
    shelf.before = failing("b")
    told: list[tuple[int, object]] = []
    StorageBackend.put_many(
        shelf, [("a", [b"1"]), ("b", [b"2"]), ("c", [b"3"])], lambda number, outcome: told.append((number, outcome))
    )
    assert [(number, type(outcome)) for number, outcome in told] == [(0, type(None)), (1, OSError), (2, type(None))]
    assert shelf.blobs == {"a": b"1", "c": b"3"}


def plug(engine: Engine) -> list[str]:
    return [str(segment.key) for segment in engine.segments(PLUG[0])]
