"""One request's trouble is not another's; operators' verbs, and the end."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch
from clock_support import Hang
from core_support import CHUNK, SPEC, Gate, Shelf, eventually, kv_of, tokens_of
from faults_support import KV, MEMORY, SHELF, TOKENS, Open, chunk_names, count, filled, retrieve

from kvloom import BackendError, Buffers, chain, open_tier

# -- one request's trouble is not another's ----------------------------------------------------------------------------


def slow_gets(shelf: Shelf, seconds: float) -> None:
    shelf.before = lambda verb, key: time.sleep(seconds) if verb == "get" else None


def test_a_miss_or_a_cancel_in_one_request_costs_the_next_nothing(
    open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    other, other_kv = tokens_of(32, 8), kv_of(32, 8)
    with open_engine(SHELF) as first:
        first.store(TOKENS, kv=KV)
        first.store(other, kv=other_kv)
    engine = open_engine(MEMORY, SHELF)
    shelf = Shelf.shelves["default"]
    del shelf._blobs[chunk_names(engine)[0]]
    engine.lookup(TOKENS)
    slow_gets(shelf, 0.1)
    assert retrieve(engine) == [False] * 4
    task = engine.load(engine.segments(other), kv=torch.zeros_like(other_kv))
    task.cancel()
    got = torch.zeros_like(other_kv)
    assert engine.retrieve(other, kv=got).all() and torch.equal(got, other_kv)
    assert count(engine, "tier_paused") == 0 == count(engine, "tier_error")
    assert "never released" not in caplog.text


def test_a_lookup_does_not_wait_behind_reads(open_engine: Open, gate: Gate) -> None:
    filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    Shelf.shelves["default"].before = lambda verb, key: gate(verb, key) if verb == "get" else None
    loads = [engine.prefetch(TOKENS) for _ in range(3)]
    gate.reached(4)
    assert engine.lookup(TOKENS, ["shelf"]).tokens == 16
    assert not any(load.done for load in loads)


def test_a_store_that_cannot_say_what_one_blob_is_still_gets_the_others(open_engine: Open) -> None:
    shelf = filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    names = chunk_names(engine)
    for name in names[1:]:
        del shelf._blobs[name]

    def odd(verb: str, key: str) -> None:
        if verb == "get" and key == names[0]:
            raise IsADirectoryError(21, "Is a directory")

    Shelf.shelves["default"].before = odd
    engine.store(TOKENS, kv=KV)
    assert engine.flush(20) and set(names) <= set(shelf._blobs)


def test_with_everything_pinned_nobody_waits_for_room(open_engine: Open) -> None:
    filled(open_engine)
    engine = open_engine({"type": "memory", "capacity": "8KiB"}, SHELF | {"deadline": "1h"})
    mine = tokens_of(8, 3)
    engine.store(mine, kv=kv_of(8, 3))
    assert engine.flush(20) and engine.pin(mine) == 8
    assert retrieve(engine) == [False] * 4
    engine.store(tokens_of(4, 4), kv=kv_of(4, 4))
    assert engine.lookup(mine, ["memory"]).tokens == 8


def test_a_file_of_absurd_size_is_corrupt_and_evicts_nothing(open_engine: Open) -> None:
    shelf = filled(open_engine)
    engine = open_engine({"type": "memory", "capacity": "4MiB"}, SHELF)
    mine = tokens_of(16, 3)
    engine.store(mine, kv=kv_of(16, 3))
    name = chunk_names(engine)[0]
    shelf._blobs[name] += bytes(3 << 20)
    assert retrieve(engine) == [False] * 4
    assert name not in shelf._blobs and count(engine, "evicted") == 0
    assert engine.lookup(mine, ["memory"]).tokens == 16


# -- operators' verbs and the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["remove", "clear"])
def test_a_purge_that_failed_says_so_and_forgets_nothing(open_engine: Open, verb: str) -> None:
    tiers = (SHELF, {**SHELF, "name": "other", "shelf": "other"})
    filled(open_engine, *tiers)
    engine = open_engine(MEMORY, *tiers)

    def fail(called: str, key: str) -> None:
        if called == "delete":
            raise OSError(30, "Read-only file system")

    purge = {"remove": lambda: engine.remove(TOKENS), "clear": lambda: engine.clear("")}[verb]
    Shelf.shelves["default"].before = Shelf.shelves["other"].before = fail
    left = f"{verb} failed, blobs may be left: "
    with pytest.raises(BackendError, match=rf"^shelf: {left}.*; other: {left}"):
        purge()
    assert engine.lookup(TOKENS).tokens == 16, "still there, and not said to be gone"
    Shelf.shelves["default"].before = Shelf.shelves["other"].before = lambda *_: None
    purge()
    assert engine.lookup(TOKENS).tokens == 0 and not Shelf.shelves["default"].blobs


@pytest.mark.parametrize("fails", [False, True], ids=["", "and fails once it is there"])
def test_a_late_write_does_not_bring_back_what_was_cleared(
    open_engine: Open, hang: Hang, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    put = Shelf.put

    def put_and_fail(shelf: Shelf, key: str, blob: Buffers) -> None:
        put(shelf, key, blob)
        if fails and not key.startswith("spec"):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(Shelf, "put", put_and_fail)
    engine = open_engine(MEMORY, SHELF)
    shelf = Shelf.shelves["default"]
    shelf.before = lambda verb, key: hang(verb, key) if verb == "put" and not key.startswith("spec") else None
    engine.store(TOKENS[:4], kv=KV)
    hang.reached()
    engine.clear()
    hang.open()
    assert eventually(lambda: not engine.tiers["shelf"].abandoned_calls)
    assert engine.flush(20) and not shelf.blobs and engine.lookup(TOKENS).tokens == 0


def test_a_late_write_that_cannot_be_taken_back_counts_and_is_not_served(
    open_engine: Open, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloom.tiers.stored.maintenance.ROUND_SECONDS", 0.05)
    engine = open_engine(MEMORY, SHELF)
    shelf, tier = Shelf.shelves["default"], engine.tiers["shelf"]
    blobs = [segment.key for segment in engine.segments(TOKENS[:4])]

    def trouble(verb: str, key: str) -> None:
        if verb == "put" and not key.startswith("spec"):
            hang(verb, key)
            shelf.before = fail

    def fail(verb: str, key: str) -> None:
        if verb == "delete":
            raise OSError(30, "Read-only file system")

    def served() -> bool:
        found = engine.lookup(TOKENS[:4]).tokens
        return bool(found or engine.retrieve(TOKENS[:4], kv=torch.zeros_like(KV)).any())

    shelf.before = trouble
    engine.store(TOKENS[:4], kv=KV)
    hang.reached()
    engine.remove(TOKENS[:4])
    hang.open()
    assert eventually(lambda: shelf.blobs and not tier.abandoned_calls and tier.maintenance.owed)
    assert engine.flush(20) and list(shelf.blobs) == [str(key) for key in blobs] and not served()
    assert eventually(lambda: tier.ledger.bytes == 8192), "not while a round of upkeep tries to delete it"
    deleting = Gate()
    shelf.before = lambda verb, key: (deleting(verb, key), fail(verb, key)) if verb == "delete" else None
    deleting.reached()
    assert not served(), "a round of upkeep tries to delete it"
    deleting.open()
    assert eventually(lambda: tier.ledger.known(blobs) != [None]) and not served()
    engine.store(TOKENS[:4], kv=KV)  # it was removed, not forbidden
    assert engine.flush(20) and served() and not tier.maintenance.owed


def test_what_a_late_write_left_is_not_served_while_it_is_taken_back(open_engine: Open, hang: Hang) -> None:
    engine = open_engine(MEMORY, SHELF)
    shelf = Shelf.shelves["default"]
    taking_back = Gate()

    def hold(verb: str, key: str) -> None:
        if verb == "put" and not key.startswith("spec"):
            hang(verb, key)
            shelf.before = lambda verb, key: taking_back(verb, key) if verb == "delete" else None

    shelf.before = hold
    engine.store(TOKENS[:4], kv=KV)
    hang.reached()
    engine.remove(TOKENS[:4])
    hang.open()
    taking_back.reached()
    assert shelf.blobs and not engine.retrieve(TOKENS[:4], kv=torch.zeros_like(KV)).any()
    assert (
        engine.lookup(TOKENS[:4]).tokens == 0 and engine.tiers["shelf"].get(engine.segments(TOKENS[:4])[0].key) is None
    )
    engine.store(TOKENS[:4], kv=KV)  # it was removed, not forbidden
    assert engine.lookup(TOKENS[:4]).tokens == 4
    taking_back.open()


def test_a_late_read_does_not_bring_back_what_was_removed(open_engine: Open, gate: Gate) -> None:
    filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    shelf = Shelf.shelves["default"]
    real = shelf.get_into

    def held(key: str, sink: object) -> bool:
        found = real(key, sink)  # type: ignore[arg-type]
        gate("get", key)
        return found

    shelf.get_into = held  # type: ignore[method-assign]
    task = engine.prefetch(TOKENS)
    gate.reached(4)
    engine.remove(TOKENS)
    gate.open()
    assert not task.result(20).any()
    assert engine.lookup(TOKENS).tokens == 0 and engine._stack.memory.used_bytes == 0


def test_closing_ends_every_task_and_the_verbs_say_so(open_engine: Open, hang: Hang) -> None:
    filled(open_engine)
    engine = open_engine(MEMORY, SHELF)
    Shelf.shelves["default"].before = lambda verb, key: hang(verb, key) if verb == "get" else None
    tasks = [engine.prefetch(TOKENS) for _ in range(12)]
    engine.close()
    for task in tasks:
        with contextlib.suppress(BackendError):
            task.result(20)
        assert task.done
    for verb in (engine.store, engine.retrieve):
        with pytest.raises(BackendError, match="closed"):
            verb(TOKENS, kv=KV)
    with pytest.raises(BackendError, match="closed"):
        engine.lookup(TOKENS)


def test_a_backend_that_hangs_in_close_is_left_behind(open_engine: Open, hang: Hang) -> None:
    engine = open_engine(MEMORY, SHELF)
    Shelf.shelves["default"].close = lambda: hang("close", "")  # type: ignore[method-assign]
    engine.close()
    assert count(engine, "tier_error") == 1


def test_a_listing_that_fails_is_reported(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(self: Shelf, prefix: str = "") -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Shelf, "scan", scan)
    engine = open_engine(MEMORY, SHELF | {"capacity": "1MiB"})
    assert eventually(lambda: count(engine, "tier_error"))
    assert any(key.reason.startswith("upkeep") for key in engine.counters())


def test_an_engine_that_cannot_open_leaves_no_thread(open_engine: Open) -> None:
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(ValueError, match="less than one chunk"):
            open_engine({"type": "memory", "capacity": "16B"}, observers=["log"])
    assert eventually(lambda: threading.active_count() <= before)


def test_put_respects_write_never_and_a_device_that_is_not_here_is_refused() -> None:
    tier = open_tier({"type": "dict", "write": "never"}, SPEC)
    key = "f" * 32
    segment = chain(TOKENS, chunk_tokens=CHUNK, fingerprint=key)[0]
    assert tier.batched_put([(segment.key, KV[:, :, :4])]) == 0 and not tier.contains(segment.key)
    tier.close()
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="dst_device: 'cuda:99' cannot be used here, use 'cpu'"):
            open_tier("memory", SPEC, dst_device="cuda:99")
