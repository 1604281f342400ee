"""A tier's accounting when deletes, puts and removals fail: exactly what is in the store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from clock_support import Hang, SkippingClock
from core_support import Gate, Shelf, kv_of, tokens_of
from policies_support import BLOB_BYTES, MEMORY, SHELF, Open, count, eventually, held, stored

from kvloom import BackendError, Engine


def ledger_is_exact(engine: Engine) -> bool:
    (tier,) = (tier for tier in engine.health().tiers if tier.name == "shelf")
    blobs = Shelf.shelves["default"].blobs
    return (tier.blobs, tier.bytes) == (len(blobs), sum(-(-len(blob) // 4096) * 4096 for blob in blobs.values()))


def test_deletes_that_fail_are_not_forgotten(open_engine: Open, skipping: SkippingClock) -> None:
    engine = open_engine(SHELF | {"capacity": 4 * BLOB_BYTES})
    stored(engine, 1)

    def stuck(verb: str, key: str) -> None:
        if verb == "delete":
            raise OSError(16, "Device or resource busy")

    shelf = Shelf.shelves["default"]
    shelf.before = stuck
    stored(engine, 2)
    assert len(shelf.blobs) == 4 and ledger_is_exact(engine), "no room could be made, so nothing came in"
    shelf.before = lambda *_: None
    skipping.skip(5)  # it is paused for less, and not listed again by then
    assert eventually(lambda: not engine.tiers["shelf"].calls.write_paused)  # type: ignore[attr-defined]
    stored(engine, 3)
    assert len(shelf.blobs) <= 4 and held(engine, 3) > 0 and ledger_is_exact(engine)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_put_that_raises_counts_as_what_it_did(open_engine: Open, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    engine = open_engine(MEMORY, SHELF | {"capacity": "1MiB"})
    put = Shelf.put

    def odd(self: Shelf, key: str, blob: Any) -> None:
        if when == "after":
            put(self, key, blob)
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(Shelf, "put", odd)
    stored(engine, 1, length=8)
    assert len(Shelf.shelves["default"].blobs) == (2 if when == "after" else 0)
    assert ledger_is_exact(engine)


def test_a_full_store_makes_room_for_itself(open_engine: Open) -> None:
    engine = open_engine(SHELF | {"capacity": "1MiB"})
    stored(engine, 1, 2)
    shelf = Shelf.shelves["default"]

    def small(verb: str, key: str) -> None:
        if verb == "put" and len(shelf.blobs) >= 8:
            raise OSError(28, "No space left on device")

    shelf.before = small
    stored(engine, 3)
    assert held(engine, 3) == 16 and len(shelf.blobs) <= 8
    assert engine.health().ok and count(engine, "evicted") > 0


def removed_while_it_was_written(engine: Engine, gate: Gate) -> tuple[Shelf, Callable[[], None]]:
    """Store prompt 1 so that one removed chunk stays in the store; return the shelf, and a function that lets deletes
    work."""
    shelf = Shelf.shelves["default"]

    def trouble(verb: str, key: str) -> None:
        if verb == "put" and not key.startswith("spec"):
            gate(verb, key)
        if verb == "delete" and gate.waiting and key in shelf.blobs:
            raise OSError(16, "Device or resource busy")

    shelf.before = trouble
    engine.store(tokens_of(4, 1), kv=kv_of(4, 1))
    gate.reached()
    engine.remove(tokens_of(4, 1))
    gate.open()
    assert eventually(lambda: count(engine, "tier_error") or engine.flush(0)) and engine.flush(20)
    assert len(shelf.blobs) == 1

    def mend() -> None:
        shelf.before = lambda *_: None

    return shelf, mend


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("bound", [{}, {"capacity": "1MiB"}])
def test_what_was_removed_while_it_was_written_is_deleted_as_soon_as_that_works(
    open_engine: Open, hang: Hang, bound: dict[str, str]
) -> None:
    engine = open_engine(MEMORY, SHELF | bound)
    shelf, mend = removed_while_it_was_written(engine, hang)
    time.sleep(0.1)
    assert len(shelf.blobs) == 1
    mend()
    assert eventually(lambda: not shelf.blobs)
    assert eventually(lambda: count(engine, "evicted", "removed") == 1 and ledger_is_exact(engine))


def test_what_was_stored_again_after_it_was_removed_stays(open_engine: Open, hang: Hang) -> None:
    engine = open_engine(MEMORY, SHELF | {"capacity": "1MiB"})
    shelf, mend = removed_while_it_was_written(engine, hang)
    tier: Any = engine.tiers["shelf"]
    (segment,) = engine.segments(tokens_of(4, 1))
    tier.put(segment.key, kv_of(4, 1))
    mend()
    tier.maintenance._tidy()
    assert len(shelf.blobs) == 1 and tier.contains(segment.key) and count(engine, "evicted") == 0


def test_what_goes_while_it_is_put_again_is_expected_by_nobody(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF | {"capacity": BLOB_BYTES})
    shelf = Shelf.shelves["default"]
    tier: Any = engine.tiers["shelf"]
    gates = {"put": Gate(), "delete": Gate()}
    shelf.before = lambda verb, key: gates[verb](verb, key) if verb in gates and key[:5] != "spec/" else None
    chunks = [(engine.segments(tokens_of(4, seed))[0].key, kv_of(4, seed)) for seed in (1, 2)]
    assert tier.batched_put(chunks, blocking=False) == 2
    assert eventually(lambda: gates["put"].waiting == 2), "there is room for one, and two are admitted"
    gates["put"].open()
    assert eventually(lambda: gates["delete"].waiting), "one of them goes right after it was written"
    tier.batched_put(chunks, blocking=False)  # of what is still under way, that stands for it
    gates["delete"].open()
    assert engine.flush(20)
    assert len(tier.ledger.names()) == len(tier.ledger) == len(shelf.blobs) <= 1


def test_a_removal_that_fails_half_way_leaves_what_is_there_counted(open_engine: Open) -> None:
    engine = open_engine({"type": "shelf", "capacity": "1MiB"})
    tokens = tokens_of(16)
    engine.store(tokens, kv=kv_of(16))
    assert engine.flush()
    shelf = Shelf.shelves["default"]
    for remove in (lambda: engine.remove(tokens), engine.clear):
        deleted: list[str] = []

        def second_fails(verb: str, key: str, deleted: list[str] = deleted) -> None:
            if verb == "delete":
                deleted.append(key)
                if len(deleted) == 2:
                    raise OSError("flaky")

        shelf.before = second_fails
        with pytest.raises(BackendError):
            remove()
        shelf.before = lambda verb, key: None
        assert shelf.blobs and engine.health().tiers[-1].blobs == len(shelf.blobs)


def test_what_is_past_its_time_counts_until_it_is_deleted(open_engine: Open, clock: Callable[[float], None]) -> None:
    with open_engine(SHELF) as engine:
        stored(engine, 1)
    clock(4000)
    engine = open_engine(SHELF | {"ttl": "1h"})
    tier: Any = engine.tiers["shelf"]
    assert eventually(lambda: tier.ledger.complete)
    keys = [segment.key for segment in engine.segments(tokens_of(16, 1))]
    inquiry = tier.inquire(keys, tier._context())
    inquiry.wait(tier._runtime.now() + 20)
    assert tier.satisfied(keys, inquiry) == [False] * 4, "it should be written again"
    assert eventually(lambda: ledger_is_exact(engine))


def test_what_is_cleared_while_it_is_being_listed(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    with open_engine(SHELF) as engine:
        stored(engine, 1)
    scan = Shelf.scan

    def listed(self: Shelf, prefix: str = "") -> Any:
        yield from scan(self, prefix)
        if not prefix:
            gate("scan", prefix)

    monkeypatch.setattr(Shelf, "scan", listed)
    engine = open_engine(SHELF | {"capacity": "1MiB"})
    gate.reached()
    engine.clear()
    gate.open()
    assert eventually(lambda: engine.health().tiers[0].recovered) and ledger_is_exact(engine)
