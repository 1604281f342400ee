"""What a tier may hold: capacity, time, quotas, who evicts, what is let in, and what is written when memory lets go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from core_support import SPEC, Gate, Shelf, kv_of, tokens_of

from kvloom import BackendError, ConfigError, Engine, Entry, envelope
from kvloom.keys import salt_tag
from kvloom.runtime import SystemRuntime
from kvloom.tiers import upkeep

MEMORY = {"type": "memory", "capacity": "1MiB"}
SHELF = {"type": "shelf", "deadline": "20s"}
BLOB_BYTES = 8192
"""Of one chunk: a page of header and a page of payload."""
Open = Callable[..., Engine]
TOKENS, KV = tokens_of(16), kv_of(16)


def eventually(done: Callable[[], Any]) -> bool:
    until = time.monotonic() + 20
    while not done() and time.monotonic() < until:
        time.sleep(0.005)
    return bool(done())


def count(engine: Engine, name: str, reason: str = "") -> int:
    return sum(
        totals.chunks for key, totals in engine.counters().items() if key.name == name and key.reason.startswith(reason)
    )


def stored(engine: Engine, *seeds: int, length: int = 16, salt: str = "") -> None:
    for seed in seeds:
        engine.store(tokens_of(length, seed), kv=kv_of(length, seed), salt=salt)
        assert engine.flush(20)


def held(engine: Engine, seed: int, *, tier: str = "shelf", salt: str = "") -> int:
    return engine.lookup(tokens_of(16, seed), [tier], salt=salt).tokens


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upkeep looks round all the time."""
    monkeypatch.setattr(upkeep, "ROUND_SECONDS", 0.02)
    monkeypatch.setattr(upkeep, "RELIST_SECONDS", 0.05)
    monkeypatch.setattr(upkeep, "TELL_SECONDS", 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the wall clock."""
    ahead = 0.0

    def move(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    monkeypatch.setattr(SystemRuntime, "wall", staticmethod(lambda: time.time() + ahead))
    return move


def test_memory_that_is_not_to_be_had_is_said_at_start(open_engine: Open) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.0\.capacity: \d+ bytes of memory are not to be had .*give less"):
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
    assert count(engine, "missed", "expired") > 0 and count(engine, "corrupt") == 0


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
    """Of a chain's names in the shelf there is none without all before it, and at least one."""
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


# -- who evicts --------------------------------------------------------------------------------------------------------


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
    """What the successor wrote and its predecessor evicted must not count against what is there."""
    town = Town()
    town.install(monkeypatch)
    tier = SHELF | {"capacity": 8 * BLOB_BYTES}
    first = open_engine(tier)
    second = open_engine(tier)
    assert first.health().tiers[0].evicts and not second.health().tiers[0].evicts
    shelf = Shelf.shelves["default"]
    stored(second, *range(1, 12))
    assert eventually(lambda: len(shelf.blobs) <= 16)
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


# -- accounting when things fail ---------------------------------------------------------------------------------------


def ledger_is_exact(engine: Engine) -> bool:
    (tier,) = (tier for tier in engine.health().tiers if tier.name == "shelf")
    blobs = Shelf.shelves["default"].blobs
    return (tier.blobs, tier.bytes) == (len(blobs), sum(-(-len(blob) // 4096) * 4096 for blob in blobs.values()))


def test_deletes_that_fail_are_not_forgotten(open_engine: Open) -> None:
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
    """Of the chunks of prompt 1 the one that lies in the store though it was removed; and what lets deletes work."""
    shelf = Shelf.shelves["default"]

    def trouble(verb: str, key: str) -> None:
        if verb == "put" and not key.startswith("spec"):
            gate(verb, key)
        if verb == "delete" and gate.waiting and key in shelf.blobs:
            raise OSError(16, "Device or resource busy")

    shelf.before = trouble
    engine.store(tokens_of(4, 1), kv=kv_of(4, 1))
    assert eventually(lambda: gate.waiting)
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
    open_engine: Open, gate: Gate, bound: dict[str, str]
) -> None:
    engine = open_engine(MEMORY, SHELF | {"deadline": "200ms"} | bound)
    shelf, mend = removed_while_it_was_written(engine, gate)
    time.sleep(0.1)
    assert len(shelf.blobs) == 1
    mend()
    assert eventually(lambda: not shelf.blobs)
    assert eventually(lambda: count(engine, "evicted", "removed") == 1 and ledger_is_exact(engine))


def test_what_was_stored_again_after_it_was_removed_stays(open_engine: Open, gate: Gate) -> None:
    engine = open_engine(MEMORY, SHELF | {"deadline": "200ms", "capacity": "1MiB"})
    shelf, mend = removed_while_it_was_written(engine, gate)
    tier: Any = engine.tiers["shelf"]
    (segment,) = engine.segments(tokens_of(4, 1))
    tier.put(segment.key, kv_of(4, 1))
    mend()
    tier.upkeep._tidy()
    assert len(shelf.blobs) == 1 and tier.contains(segment.key) and count(engine, "evicted") == 0


# -- written when memory lets go ---------------------------------------------------------------------------------------

BEHIND = SHELF | {"write": "on_evict"}


def test_what_memory_lets_go_is_written_and_found_again(open_engine: Open) -> None:
    engine = open_engine({"type": "memory", "capacity": "64KiB"}, BEHIND)
    engine.store(tokens_of(16, 1), kv=kv_of(16, 1))
    assert engine.flush(20) and not Shelf.shelves["default"].blobs, "not before"
    for seed in range(2, 20):
        engine.store(tokens_of(16, seed), kv=kv_of(16, seed))
    assert engine.flush(20)
    for seed in range(1, 20):
        got = torch.zeros_like(KV)
        assert engine.retrieve(tokens_of(16, seed), kv=got).all() and torch.equal(got, kv_of(16, seed))
    assert count(engine, "dropped") == 0


def test_what_the_store_evicts_while_memory_has_it_is_written_when_memory_lets_go(open_engine: Open) -> None:
    engine = open_engine(MEMORY, SHELF | {"capacity": "1MiB", "write": "on_evict"})
    stored(engine, 1)
    assert engine._stack.memory.write_back_all(time.monotonic() + 20) and engine.flush(20)
    assert held(engine, 1) == 16
    tier = engine._stack.stored[0]
    tier.upkeep.delete(tier.ledger.release(2 * BLOB_BYTES))
    assert held(engine, 1) == 8 and held(engine, 1, tier="memory") == 16
    engine.close()
    assert len(Shelf.shelves["default"].blobs) == 4


def test_what_memory_holds_at_the_end_is_written(open_engine: Open) -> None:
    with open_engine(MEMORY, BEHIND) as engine:
        engine.store(TOKENS, kv=KV)
    assert open_engine(SHELF).retrieve(TOKENS, kv=torch.zeros_like(KV)).all()


def test_what_came_from_below_is_not_written_again(open_engine: Open) -> None:
    with open_engine(SHELF) as engine:
        stored(engine, *range(8))
    shelf = Shelf.shelves["default"]
    engine = open_engine({"type": "memory", "capacity": "32KiB"}, BEHIND)
    shelf = Shelf.shelves["default"]
    puts: list[str] = []
    shelf.before = lambda verb, key: puts.append(key) if verb == "put" and not key.startswith("spec") else None
    for seed in range(8):
        assert engine.retrieve(tokens_of(16, seed), kv=torch.zeros_like(KV)).all()
    engine.close()
    assert not puts


def test_a_tier_that_is_paused_does_not_keep_memory_from_letting_go(open_engine: Open) -> None:
    engine = open_engine({"type": "memory", "capacity": "32KiB"}, BEHIND | {"deadline": "100ms"})

    def fail(verb: str, key: str) -> None:
        if verb == "put":
            raise OSError(5, "Input/output error")

    Shelf.shelves["default"].before = fail
    for seed in range(20):
        engine.store(tokens_of(16, seed), kv=kv_of(16, seed))
    assert engine.lookup(tokens_of(16, 19), ["memory"]).tokens == 16
    assert count(engine, "dropped") > 0


def test_blobs_say_when_they_were_stored(open_engine: Open) -> None:
    engine = open_engine(SHELF)
    stored(engine, 1)
    for name, blob in Shelf.shelves["default"].blobs.items():
        header, _ = envelope.unseal(blob, key=name)
        assert abs(header.description.written - time.time()) < 60
    assert SPEC.num_layers


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
