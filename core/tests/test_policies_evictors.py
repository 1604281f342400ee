"""Evicting from a shared store: one process at a time, its successor, and the messages to the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from core_support import Gate, Shelf, tokens_of
from policies_support import BLOB_BYTES, KV, MEMORY, SHELF, Open, count, eventually, held, stored

from kvloom import Engine, Entry, IncompleteListingError


class Town:
    """Rights on the shelves, held by one at a time."""

    def __init__(self) -> None:
        self.holder: Shelf | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def hold(shelf: Shelf, name: str) -> bool:
            assert name == "evict"
            if self.holder is None:
                self.holder = shelf
            return self.holder is shelf

        monkeypatch.setattr(Shelf, "hold", hold)


@pytest.mark.usefixtures("hurried")
def test_one_of_several_evicts_for_all(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    town = Town()
    town.install(monkeypatch)
    tier = SHELF | {"capacity": 8 * BLOB_BYTES}
    first = open_engine(tier)
    assert eventually(lambda: first.health().tiers[0].evicts)
    second = open_engine(tier)
    stored(second, *range(1, 8))
    shelf = Shelf.shelves["default"]

    def fits() -> bool:
        return sum(entry.bytes for entry in shelf.scan() if not entry.key.startswith("spec/")) <= tier["capacity"]

    assert not fits() or count(first, "evicted") > 0
    assert eventually(fits), "the first sees what the second writes"
    assert count(second, "evicted") == 0 and not second.health().tiers[0].evicts
    assert count(first, "evicted") > 0
    first.close()
    town.holder = None
    assert eventually(lambda: second.health().tiers[0].evicts), "the right is inherited"
    stored(second, *range(8, 14))
    assert eventually(fits)


@pytest.mark.usefixtures("hurried")
def test_who_inherits_the_right_does_not_evict_for_what_is_gone(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blobs that the successor wrote and its predecessor evicted must not count."""
    town = Town()
    town.install(monkeypatch)
    tier = SHELF | {"capacity": 8 * BLOB_BYTES}
    first = open_engine(tier)
    second = open_engine(tier)
    assert first.health().tiers[0].evicts and not second.health().tiers[0].evicts
    shelf = Shelf.shelves["default"]
    stored(second, *range(1, 12))
    assert eventually(lambda: len(shelf.blobs) <= 8)
    first.close()
    left = set(shelf.blobs)
    town.holder = None
    assert eventually(lambda: second.health().tiers[0].evicts)
    assert eventually(lambda: second.health().tiers[0].blobs == len(shelf.blobs))
    assert set(shelf.blobs) == left and left, "all that fitted is still there"


@pytest.mark.usefixtures("hurried")
def test_who_does_not_evict_learns_what_was(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    town = Town()
    town.install(monkeypatch)
    tier = SHELF | {"capacity": 8 * BLOB_BYTES}
    open_engine(tier)
    second = open_engine(tier)
    stored(second, *range(1, 12))
    shelf = Shelf.shelves["default"]
    assert eventually(lambda: second.health().tiers[0].blobs == len(shelf.blobs) < 44)
    gone = [seed for seed in range(1, 12) if held(second, seed) < 16]
    assert gone
    stored(second, gone[0])
    assert any(str(s.key) in shelf.blobs for s in second.segments(tokens_of(16, gone[0]))), "it can be stored again"


@pytest.mark.usefixtures("hurried")
def test_a_right_that_is_lost_is_noticed(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    town = Town()
    town.install(monkeypatch)
    engine = open_engine(SHELF | {"capacity": "1MiB"})
    assert engine.health().tiers[0].evicts
    town.holder = Shelf.__new__(Shelf)
    assert eventually(lambda: not engine.health().tiers[0].evicts)


@pytest.mark.usefixtures("hurried")
def test_a_round_that_is_under_way_at_the_close_takes_no_right_after_it(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    town = Town()
    town.install(monkeypatch)
    hold = Shelf.hold

    def slowly(shelf: Shelf, name: str) -> bool:
        if any(key.startswith("spec/") for key in list(shelf._blobs)):  # nothing else is to be written as it opens
            gate("hold", name)
        return hold(shelf, name)

    def close(shelf: Shelf) -> None:
        town.holder = None

    monkeypatch.setattr(Shelf, "hold", slowly)
    monkeypatch.setattr(Shelf, "close", close)
    engine = open_engine(SHELF | {"capacity": "1MiB"})
    assert eventually(lambda: gate.waiting)
    threading.Timer(0.2, gate.open).start()
    engine.close()
    assert town.holder is None


@pytest.mark.usefixtures("hurried")
def test_who_only_reads_deletes_nothing(open_engine: Open, clock: Callable[[float], None]) -> None:
    with open_engine(SHELF) as engine:
        stored(engine, 1)
    clock(4000)
    engine = open_engine(MEMORY, SHELF | {"write": "never", "ttl": "1h"})
    assert not engine.retrieve(tokens_of(16, 1), kv=torch.zeros_like(KV)).any()
    time.sleep(0.1)
    assert len(Shelf.shelves["default"].blobs) == 4


@pytest.mark.usefixtures("hurried")
def test_what_runs_out_while_it_is_only_read_is_left_to_who_writes_it(
    open_engine: Open, clock: Callable[[float], None]
) -> None:
    with open_engine(SHELF) as engine:
        stored(engine, 1)
    engine = open_engine(MEMORY, SHELF | {"write": "never", "ttl": "1h"})
    assert held(engine, 1) == 16 and engine.prefetch(tokens_of(16, 1)).result(20).all(), "it knows of every blob"
    clock(4000)
    time.sleep(0.2)
    assert held(engine, 1) == 0 and len(Shelf.shelves["default"].blobs) == 4
    assert not engine.health().tiers[1].evicts and count(engine, "evicted") == 0


def test_a_listing_that_hangs_keeps_no_operator_waiting(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    scan = Shelf.scan

    def hang(self: Shelf, prefix: str = "") -> Iterator[Entry]:
        if not prefix:
            gate("scan", prefix)
        return scan(self, prefix)

    monkeypatch.setattr(Shelf, "scan", hang)
    engine = open_engine(SHELF | {"capacity": "1MiB", "deadline": "100ms"})
    stored(engine, 1)
    engine.remove(tokens_of(16, 1))
    assert not Shelf.shelves["default"].blobs
    assert eventually(lambda: engine.health().tiers[0].abandoned_calls == 1), "and it is known to hang"


@pytest.mark.usefixtures("hurried")
def test_the_store_is_told_what_was_used(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    told: set[str] = set()
    monkeypatch.setattr(Shelf, "touch_many", lambda self, keys: told.update(keys))
    engine = open_engine(SHELF | {"capacity": "1MiB"})
    stored(engine, 1)
    assert engine.retrieve(tokens_of(16, 1), kv=torch.zeros_like(KV)).all()
    names = {str(segment.key) for segment in engine.segments(tokens_of(16, 1))}
    assert eventually(lambda: told >= names)


def test_what_was_used_last_survives_a_restart_with_less_room(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(SHELF) as engine:
        stored(engine, 1, 2)
        used = {str(segment.key) for segment in engine.segments(tokens_of(16, 1))}
    scan = Shelf.scan

    def timed(self: Shelf, prefix: str = "") -> Iterator[Entry]:
        for entry in scan(self, prefix):
            yield Entry(entry.key, BLOB_BYTES, 1e9, 2e9 if entry.key in used else 1e9)

    monkeypatch.setattr(Shelf, "scan", timed)
    engine = open_engine(SHELF | {"capacity": 4 * BLOB_BYTES})
    assert eventually(lambda: len(Shelf.shelves["default"].blobs) == 4)
    assert set(Shelf.shelves["default"].blobs) == used


@pytest.mark.usefixtures("hurried")
def test_what_cannot_be_listed_keeps_a_bounded_store_from_growing(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan, unread = Shelf.scan, [True]

    def incomplete(shelf: Shelf, prefix: str = "") -> Iterator[Entry]:
        yield from scan(shelf, prefix)
        if unread:
            raise IncompleteListingError("1 places cannot be read, the first: fp/-")

    first = open_engine(SHELF | {"capacity": 64 * BLOB_BYTES})
    stored(first, 1)
    first.close()
    monkeypatch.setattr(Shelf, "scan", incomplete)
    second = open_engine(SHELF | {"capacity": 64 * BLOB_BYTES})
    assert eventually(lambda: second.health().tiers[0].state == "degraded")
    health = second.health().tiers[0]
    assert not second.health().ok and "fp/-" in health.reason and not health.recovered
    assert health.blobs == len(Shelf.shelves["default"].blobs) > 0, "what was listed is kept"
    before = set(Shelf.shelves["default"].blobs)
    second.store(tokens_of(2), kv=torch.zeros_like(KV))
    second.flush()
    assert set(Shelf.shelves["default"].blobs) == before and held(second, 1) == 16
    unread.clear()
    assert eventually(lambda: second.health().ok), "it is tried again"
    stored(second, 2)
    assert set(Shelf.shelves["default"].blobs) > before


def failures(engine: Engine) -> int:
    return sum(totals.count for key, totals in engine.counters().items() if key.name == "tier_error")


@pytest.mark.usefixtures("hurried")
def test_a_store_that_cannot_be_listed_at_first_does_not_grow_until_it_can(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan, down = Shelf.scan, [True]

    def failing(shelf: Shelf, prefix: str = "") -> Iterator[Entry]:
        yield from [*scan(shelf, prefix)][: 1 if down else None]
        if down:
            raise ConnectionResetError(104, "Connection reset by peer")

    with open_engine(SHELF | {"capacity": 64 * BLOB_BYTES}) as first:
        stored(first, 1)
    monkeypatch.setattr(Shelf, "scan", failing)
    engine = open_engine(SHELF | {"capacity": 64 * BLOB_BYTES})
    assert eventually(lambda: engine.health().tiers[0].state == "degraded")
    assert "Connection reset" in engine.health().tiers[0].reason
    before = set(Shelf.shelves["default"].blobs)
    engine.store(tokens_of(16, 2), kv=KV)
    assert engine.flush(20) and set(Shelf.shelves["default"].blobs) == before and held(engine, 1) == 16
    down.clear()
    assert eventually(lambda: engine.health().ok), "it is listed again"
    stored(engine, 2)
    assert set(Shelf.shelves["default"].blobs) > before, "and grows"
    errors = failures(engine)
    down.append(True)
    assert eventually(lambda: failures(engine) > errors)
    assert engine.health().ok, "the listing before is an account to go by"


@pytest.mark.usefixtures("hurried")
def test_who_cannot_get_the_right_to_evict_says_so_and_learns_on(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hold(shelf: Shelf, name: str) -> bool:
        raise PermissionError(13, "Permission denied", "+hold-evict")

    with monkeypatch.context() as patched:
        patched.setattr(Shelf, "hold", hold)
        engine = open_engine(SHELF | {"capacity": 64 * BLOB_BYTES})
        assert eventually(lambda: engine.health().tiers[0].state == "degraded")
        health = engine.health().tiers[0]
        assert "right to evict" in health.reason and "+hold-evict" in health.reason and not health.evicts
        assert eventually(lambda: engine.health().tiers[0].recovered), "it is listed all the same"
    assert eventually(lambda: engine.health().ok and engine.health().tiers[0].evicts)
