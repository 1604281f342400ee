"""The memory tier: who goes and who stays, for its time, its tenant's quota, or how recently it was used."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from memory_tier_support import PAGE, A, B, C, D, E, F, Make, key_of, tiers

from kvloom import Chunk, MemoryFormat
from kvloom.memory import Pool
from kvloom.runtime import SystemRuntime
from kvloom.telemetry.events import EventBus
from kvloom.tiers.memory.tier import MemoryTier
from kvloom.tiers.tier import Layout


@pytest.fixture
def make() -> Iterator[Make]:
    with tiers() as make:
        yield make


# -- time to live ------------------------------------------------------------------------------------------------------


def test_a_chunk_past_its_time_is_absent(make: Make) -> None:
    one = make(ttl=60)
    one.put(A)
    one.clock.seconds += 59
    assert one.has(A) == [True] and one.tier.find([A], exact=True) == [True] and one.tier.contains(A)
    one.clock.seconds += 1
    assert one.has(A) == [False] and one.tier.find([A], exact=True) == [False] and not one.tier.contains(A)
    assert one.tier.lease([A]) == [None]


def test_time_counts_from_when_it_was_first_stored(make: Make) -> None:
    one = make(ttl=60)
    one.put(A, written=one.clock.seconds - 50)
    one.put(B, written=one.clock.seconds + 1e6)
    one.put(C, written=one.clock.seconds - 60)
    assert one.has(A, B, C) == [True, True, False]
    assert len(one.tier) == 2 and one.events.of("evicted") == [], "it did not come in"
    one.clock.seconds += 10
    assert one.has(A, B) == [False, True]
    one.clock.seconds += 50
    assert one.has(B) == [False], "another machine's clock does not make it live longer"


def test_the_expired_go_when_others_come(make: Make) -> None:
    one = make(pages=100, ttl=60)
    for number in range(20):
        one.put(key_of(number))
    one.clock.seconds += 61
    for number in range(100, 110):
        one.put(key_of(number))
    assert one.tier.used_bytes == 10 * PAGE
    assert one.events.of("evicted") == ["expired"] * 20


def test_the_expired_go_before_the_least_recently_used(make: Make) -> None:
    one = make(pages=3, ttl=60)
    one.put(A)
    one.put(B, written=one.clock.seconds - 59)
    one.put(C)
    one.clock.seconds += 1
    reservation = one.tier.reserve(PAGE)
    assert reservation is not None and one.tier.chunks() == [A, C]
    reservation.abandon()


def test_an_expired_chunk_is_stored_anew(make: Make) -> None:
    one = make(ttl=60)
    one.put(A)
    one.clock.seconds += 61
    one.put(A)
    assert one.has(A) == [True] and one.tier.used_bytes == PAGE
    (loaded,) = one.tier.lease([A])
    assert loaded is not None and loaded.written == one.clock.seconds
    loaded.release()


def test_a_pinned_chunk_expires_too(make: Make) -> None:
    one = make(ttl=60)
    one.put(A)
    one.tier.pin([A], True)
    one.clock.seconds += 61
    assert one.has(A) == [False] and one.tier.pin([A], True) == 0
    one.put(B)
    assert one.tier.used_bytes == PAGE and one.tier._index.pinned_bytes == 0


def test_what_is_read_while_it_expires_stays_for_its_reader(make: Make) -> None:
    one = make(ttl=60)
    loaded = one.put(A, keep=True)
    one.clock.seconds += 61
    one.put(B)
    one.put(C)
    assert one.tier.used_bytes == 3 * PAGE
    assert set(loaded.chunk.tensor.flatten().tolist()) == {0}
    loaded.release()
    assert one.tier.used_bytes == 2 * PAGE, "A is gone"


# -- quotas ------------------------------------------------------------------------------------------------------------


def test_a_tenant_evicts_its_own(make: Make) -> None:
    one = make(pages=10, quota={"a": 2 * PAGE, "*": 3 * PAGE})
    other = [key_of(number, "b") for number in range(2)]
    mine = [key_of(number, "a") for number in range(10, 14)]
    for key in [*other, *mine[:2]]:
        one.put(key)
    one.tier.touch(mine[:1])
    one.put(mine[2])
    assert one.has(*mine) == [True, False, True, False], "the least recently used of its own"
    one.put(mine[3])
    assert one.has(*mine) == [False, False, True, True] and one.has(*other) == [True, True]
    for number in range(2, 6):
        one.put(key_of(number, "b"))
    assert len(one.tier) == 2 + 3
    assert one.events.of("evicted") == ["quota"] * 5


def test_without_a_star_others_have_no_quota(make: Make) -> None:
    one = make(pages=10, quota={"a": PAGE})
    for number in range(6):
        one.put(key_of(number, "b"))
    assert len(one.tier) == 6
    assert not one.tier._index._tenants._bytes, "nor are they counted"


def test_what_a_tenant_reads_or_pins_is_not_evicted_for_its_quota(make: Make) -> None:
    one = make(pages=10, quota={"*": 2 * PAGE})
    held = one.put(A, keep=True)
    one.put(B)
    one.tier.pin([B], True)
    later = one.put(C, keep=True)
    assert one.has(A, B, C) == [True, True, False], "it does not fit beside them"
    assert bytes(later.chunk.tensor.flatten()[:2]) == bytes([2, 2]), "and is whole for who stores it"
    later.release()
    held.release()
    one.put(C)
    assert one.has(A, B, C) == [False, True, True]
    assert one.tier.used_bytes == 2 * PAGE


def test_tenants_that_are_gone_leave_nothing(make: Make) -> None:
    one = make(pages=10, quota={"*": 2 * PAGE})
    for number in range(50):
        one.put(key_of(number, f"t{number}"))
    one.tier.remove(one.tier.chunks())
    tenants = one.tier._index._tenants
    assert not tenants._bytes and not tenants._recency


# -- recency -----------------------------------------------------------------------------------------------------------


def test_no_head_goes_before_its_tail(make: Make) -> None:
    one = make(pages=6)
    chain, other = [A, B, C], [D, E, F]
    for key in [*chain, *other]:
        one.put(key)
    one.tier.touch(other)
    one.tier.touch(chain)
    gone = []
    for number in range(10, 16):
        before = set(one.tier.chunks())
        one.put(key_of(number))
        gone += [key for key in before if not one.tier.contains(key)]
    assert gone == [F, E, D, C, B, A]


def test_unpinned_chunks_come_back_in_order(make: Make) -> None:
    one = make(pages=4)
    for key in (A, B, C):
        one.put(key)
    one.tier.pin([A, B, C], True)
    one.put(D)
    assert one.tier._index.pinned_bytes == 3 * PAGE
    one.tier.pin([A, B, C], False)
    assert one.tier.chunks() == [D, C, B, A] and one.tier._index.pinned_bytes == 0


def test_a_chunk_in_use_is_passed_over_and_goes_first_afterwards(make: Make) -> None:
    one = make(pages=3)
    for key in (A, B, C):
        one.put(key)
    (loaded,) = one.tier.lease([A])
    assert loaded is not None
    one.put(D)
    assert one.tier.chunks() == [A, C, D]
    loaded.release()
    one.put(E)
    assert one.tier.chunks() == [C, D, E]


def test_a_chunk_passed_over_and_used_again_is_recent(make: Make) -> None:
    one = make(pages=3)
    for key in (A, B, C):
        one.put(key)
    (loaded,) = one.tier.lease([A])
    assert loaded is not None
    one.put(D)
    loaded.release()
    one.tier.touch([A])
    one.put(E)
    assert one.tier.chunks() == [D, A, E]


def test_passing_over_many_pinned_or_used_chunks_is_not_done_again_for_each(make: Make) -> None:
    """Counted in looks at a chunk, not in time."""
    one = make(pages=2000)
    for number in range(2000):
        one.put(key_of(number))
    one.tier.pin([key_of(number) for number in range(900)], True)
    held = one.tier.lease([key_of(number) for number in range(900, 1900)])
    looks = Counter()

    from kvloom.memory import Block

    leased = Block.leased.fget
    assert leased is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "leased", property(lambda block: looks.update(["look"]) or leased(block)))
        for number in range(2000, 2100):
            assert one.put(key_of(number))
    assert looks["look"] <= 1000 + 100 * 40
    for loaded in held:
        assert loaded is not None
        loaded.release()


def test_one_long_piece_does_not_empty_memory_all_over(make: Make) -> None:
    """Every second page is free or cold; a piece of four pages needs four that lie beside each other."""
    one = make(pages=64)
    keys = [key_of(number) for number in range(64)]
    for key in keys:
        one.put(key)
    one.tier.touch(keys[1::2])
    reservation = one.tier.reserve(4 * PAGE)
    assert reservation is not None
    assert 64 - len(one.tier) <= 4 + 4, "by age alone it takes 33"
    reservation.abandon()


def test_what_lies_beside_the_gap_stays_if_it_may_not_go(make: Make) -> None:
    one = make(pages=64)
    keys = [key_of(number) for number in range(64)]
    for key in keys:
        one.put(key)
    one.tier.touch(keys[1::2])
    one.tier.pin(keys[1:32:4], True)
    held = one.tier.lease(keys[3:32:4])
    reservation = one.tier.reserve(8 * PAGE)
    assert reservation is not None and all(one.has(*keys[1:32:2]))
    reservation.abandon()
    for loaded in held:
        loaded.release()


def test_what_is_free_again_is_found_however_many_are_in_use(make: Make) -> None:
    one = make(pages=60)
    for number in range(60):
        one.put(key_of(number))
    held = one.tier.lease([key_of(number) for number in range(60)])
    assert one.tier.reserve(PAGE) is None
    held[45].release()
    reservation = one.tier.reserve(PAGE)
    assert reservation is not None and not one.tier.contains(key_of(45))
    reservation.abandon()
    for loaded in held:
        loaded.release()


def test_an_exact_chunk_takes_the_pinned_place_of_a_lossy_one(make: Make) -> None:
    one = make(pages=2)
    one.put(A, fidelity="signs")
    one.tier.pin([A], True)
    one.put(A)
    assert one.tier.find([A], exact=True) == [True]
    for key in (B, C):
        one.put(key)
    assert one.has(A, B, C) == [True, False, True] and one.tier._index.pinned_bytes == PAGE


class Patient(SystemRuntime):
    """Conditions that wait until they are notified, whatever the timeout (or a long while): a lost wake-up is seen."""

    def condition(self) -> Any:
        condition = threading.Condition(threading.Lock())
        wait = condition.wait
        condition.wait = lambda timeout=None: wait(20)  # type: ignore[method-assign]
        return condition


@pytest.mark.parametrize("when", ["while it waits", "just before"])
def test_who_waits_for_room_is_woken_by_a_lease_that_ends(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Patient()
    pool = Pool(PAGE, runtime)
    layout = Layout(MemoryFormat.KV_BLOB, torch.uint8, lambda tokens: (2, 1, tokens, PAGE // 8))
    tier = MemoryTier(layout, pool, EventBus((), runtime), runtime)
    reservation = tier.reserve(PAGE)
    assert reservation is not None
    chunk = Chunk(reservation.tensor((PAGE,), torch.uint8), MemoryFormat.KV_BLOB, 4)
    loaded = tier.insert(A, chunk, reservation.seal())
    wait = pool.wait_for_room

    def released(*args: Any) -> None:
        if when == "just before":
            loaded.release()
        else:
            threading.Timer(0.05, loaded.release).start()
        wait(*args)

    monkeypatch.setattr(pool, "wait_for_room", released)
    began = runtime.now()
    again = tier.reserve_by(PAGE, began + 60)
    assert again is not None and runtime.now() - began < 10
    again.abandon()
    pool.close()


def test_too_many_changes_become_a_listing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.tiers.memory.index._MOST_CHANGES", 3)
    one = make(pages=10)
    assert one.tier.changes() == ([], [], True)
    for number in range(3):
        one.put(key_of(number))
    assert one.tier.changes() == ([key_of(0), key_of(1), key_of(2)], [], False)
    one.tier.remove([key_of(1)])
    assert one.tier.changes() == ([], [key_of(1)], False)
    for number in range(4, 8):
        one.put(key_of(number))
    changes = one.tier.changes()
    assert changes.whole and set(changes.came) == set(one.tier.chunks()) and changes.left == []
