"""The memory tier that hands on what it lets go: what is offered and when, and nothing lost on the way."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from memory_tier_support import PAGE, A, B, C, D, E, F, Make, Queue, key_of, tiers

from kvloom import ChunkKey
from kvloom.runtime import SystemRuntime
from kvloom.tiers.tier import Loaded


@pytest.fixture
def make() -> Iterator[Make]:
    with tiers() as make:
        yield make


def test_the_coldest_part_is_written_ahead_of_need(make: Make) -> None:
    one, queue = make(pages=16), Queue()
    one.tier.write_back.write = queue
    for number in range(14):
        one.put(key_of(number))
    assert queue.asked == []
    one.put(key_of(14))
    one.put(key_of(15))
    assert queue.asked == [A, B], "the coldest eighth, and not before it is needed"
    assert one.has(A, B) == [True, True] and len(one.tier) == 16, "they stay until room is needed"
    queue.written()
    one.put(key_of(16))
    assert one.has(A, B) == [False, True] and queue.asked == [A, B, C]
    assert one.events.of("dropped") == []


def test_what_is_not_written_is_not_evicted_until_the_deadline(make: Make) -> None:
    one, queue = make(pages=2), Queue(None)
    one.tier.write_back.write = queue
    one.put(A)
    one.put(B)
    assert one.put(C) is None and one.has(A, B) == [True, True]
    reservation = one.tier.reserve_by(PAGE, one.clock.seconds)
    assert reservation is not None and one.has(A, B) == [False, True]
    assert one.events.of("dropped") == ["evicted before it was written"]
    reservation.abandon()


def test_being_written_it_stays_until_the_write_is_over(make: Make) -> None:
    one, queue = make(pages=2), Queue()
    one.tier.write_back.write = queue
    one.put(A)
    one.put(B)
    assert one.put(C) is None and set(queue.taken) == {A, B} and one.has(A, B) == [True, True]
    threading.Timer(0.05, queue.written).start()
    real = SystemRuntime()
    began = real.now()
    one.clock.now = lambda: one.clock.seconds + real.now() - began  # type: ignore[method-assign]
    one.pool.now = one.clock.now
    reservation = one.tier.reserve_by(PAGE, one.clock.now() + 30)
    assert reservation is not None and one.has(A, B) == [False, True] and one.events.of("dropped") == []
    reservation.abandon()


def test_what_will_never_be_written_is_evicted_at_once(make: Make) -> None:
    one, queue = make(pages=2), Queue(False)
    one.tier.write_back.write = queue
    for key in (A, B, C):
        assert one.put(key)
    assert one.has(A, B, C) == [False, True, True]


def test_a_clean_or_lossy_chunk_is_never_offered(make: Make) -> None:
    one, queue = make(pages=2), Queue()
    one.tier.write_back.write = queue
    one.put(A, dirty=False)
    one.put(B, fidelity="signs")
    for key in (C, D):
        one.put(key, dirty=False)
    assert queue.asked == [] and one.has(C, D) == [True, True]


def test_clean_chunks_make_room_where_dirty_ones_cannot(make: Make) -> None:
    one, queue = make(pages=3), Queue(None)
    one.tier.write_back.write = queue
    one.put(A)
    one.put(B)
    one.put(C, dirty=False)
    assert one.put(D, dirty=False) and one.has(A, B, C) == [True, True, False]


def test_making_room_looks_past_what_is_dirty_or_in_use(make: Make) -> None:
    one, queue = make(pages=3), Queue(None)
    one.tier.write_back.write = queue
    one.put(A)
    reading = one.put(B, dirty=False, keep=True)
    one.put(C, dirty=False)
    assert one.put(D) and one.has(A, B, C) == [True, True, False]
    reading.release()


@pytest.mark.parametrize("quota", [None, {"*": 2 * PAGE}], ids=["none", "quota"])
def test_what_others_set_aside_while_it_is_offered_is_next_to_go_again(make: Make, quota: Any) -> None:
    one, queue = make(pages=2 if quota is None else 6, quota=quota), Queue(None)
    one.put(A, dirty=True)

    def write_back(key: ChunkKey, loaded: Loaded) -> bool | None:
        if key == A and A not in queue.asked:
            queue.asked.append(A)
            other = threading.Thread(target=lambda: one.put(C, dirty=False))
            other.start()
            other.join(10)
            return None
        return queue(key, loaded)

    one.tier.write_back.write = write_back
    one.tier.remove([A])
    one.put(A)
    if A not in queue.asked:
        one.put(B, dirty=False)
        one.put(D, dirty=False)
    order = one.tier._index.recency if quota is None else one.tier._index._tenants.recency(A)
    assert order.keys()[0] == A and not order._aside
    one.tier.write_back.write = Queue(False)
    one.put(E)
    one.put(F)
    assert not one.tier.contains(A)


def test_a_chunk_stored_again_while_it_leaves_stays(make: Make) -> None:
    one, queue = make(pages=16, quota={"*": 2 * PAGE}), Queue()
    one.tier.write_back.write = queue
    for key in (A, B, C):
        one.put(key)
    assert list(queue.taken) == [A]
    one.put(A)
    queue.written()
    one.put(D)
    queue.written()
    one.put(D)
    assert one.tier.chunks() == [A, D] and one.tier.used_bytes == 2 * PAGE


def test_what_was_written_is_not_written_again(make: Make) -> None:
    one, queue = make(pages=8), Queue()
    one.tier.write_back.write = queue
    for number in range(8):
        one.put(key_of(number))
    queue.written()
    one.tier.touch([A])
    for number in range(10, 24):
        one.put(key_of(number))
        queue.written()
    assert Counter(queue.asked)[A] == 1 and not one.tier.contains(A)


def test_what_is_lost_below_is_written_again(make: Make) -> None:
    one, queue = make(pages=8), Queue()
    one.tier.write_back.write = queue
    for number in range(8):
        one.put(key_of(number))
    queue.written()
    assert Counter(queue.asked)[A] == 1
    one.tier.touch([A])
    one.tier.write_back.lost_below([A, key_of(99)])
    for number in range(10, 30):
        one.put(key_of(number))
        queue.written()
    assert Counter(queue.asked)[A] == 2 and not one.tier.contains(A)


def test_chunks_that_evict_each_other_below_are_not_written_without_end(make: Make) -> None:
    """The tier below is as quick as memory, and has room for one."""
    one, asked, below = make(pages=16), list[ChunkKey](), list[ChunkKey]()

    def write_back(key: ChunkKey, loaded: Loaded) -> bool | None:
        if len(asked) == 1000:
            return None
        asked.append(key)
        loaded.release()
        one.tier.write_back.lost_below(below)
        below[:] = [key]
        return True

    one.tier.write_back.write = write_back
    for number in range(24):
        one.put(key_of(number))
    assert len(one.tier.chunks()) == 16 and 8 <= len(asked) < 100
    assert one.tier.write_back_all(one.clock.now()) and len(asked) < 200


def test_a_chunk_removed_while_it_is_offered_stays_away(make: Make) -> None:
    one = make(pages=2)
    for verdict in (True, None, False):
        removed = threading.Event()
        remover: list[threading.Thread] = []

        def write_back(
            key: ChunkKey, loaded: Loaded, verdict: bool | None = verdict, removed=removed, remover=remover
        ) -> bool | None:
            if key == A and not remover:
                remover.append(threading.Thread(target=lambda: (one.tier.remove([A]), removed.set())))
                remover[0].start()
                while one.tier.contains(A):
                    SystemRuntime.sleep(0.001)
                assert not removed.wait(0.05), "whoever deletes it below comes after the answer"
            if verdict:
                loaded.release()
            return verdict

        one.tier.write_back.write = write_back
        one.put(A)
        one.put(B)
        one.put(C)
        remover[0].join(10)
        assert removed.is_set() and not one.tier.contains(A)
        one.tier.write_back.write = None
        one.tier.remove([B, C])
        assert one.tier.used_bytes == 0


def test_a_removed_chunk_in_the_queue_is_only_its_writers(make: Make) -> None:
    one, queue = make(pages=2), Queue()
    one.tier.write_back.write = queue
    one.put(A)
    one.put(B)
    assert one.tier.remove([A]) == 1
    assert one.tier.used_bytes == 2 * PAGE, "its writer reads it"
    queue.written()
    assert one.tier.used_bytes == PAGE and one.has(A) == [False]


def test_a_quota_hands_on_before_it_evicts(make: Make) -> None:
    one, queue = make(pages=16, quota={"*": 2 * PAGE}), Queue()
    one.tier.write_back.write = queue
    for key in (A, B, C, D):
        one.put(key)
    assert queue.asked == [A, B] and one.has(A, B, C, D) == [True] * 4, "to be found until it is written"
    queue.written()
    one.put(E)
    one.put(F)
    queue.written()
    one.put(F)
    assert one.tier.chunks() == [E, F] and one.tier.used_bytes == 2 * PAGE
    assert one.events.of("evicted") == ["quota"] * 4


def test_what_is_pinned_while_it_is_handed_on_for_its_quota_stays(make: Make) -> None:
    one, queue = make(pages=16, quota={"*": 2 * PAGE}), Queue()
    one.tier.write_back.write = queue
    for key in (A, B, C, D):
        one.put(key)
    assert queue.asked == [A, B] and one.tier.pin([A], True) == 1
    queue.written()
    for key in (E, F):
        one.put(key)
        queue.written()
    assert one.has(A, B) == [True, False]
    one.tier.pin([A], False)
    for key in (C, D, E):
        one.put(key)
        queue.written()
    assert one.has(A) == [False] and one.tier.used_bytes <= 3 * PAGE, "it counts again, and goes like any other"


def test_what_memory_does_not_keep_is_offered_at_once(make: Make) -> None:
    one, queue = make(quota={"*": 0}), Queue()
    one.tier.write_back.write = queue
    one.put(A)
    assert queue.asked == [A] and len(one.tier) == 0
    queue.written()
    queue.verdict = None
    one.put(B)
    assert one.tier.used_bytes == 0
    assert one.events.of("dropped") == ["not kept in memory, and no room to write it"]


def test_an_expired_dirty_chunk_is_handed_on(make: Make) -> None:
    one, queue = make(ttl=60), Queue()
    one.tier.write_back.write = queue
    one.put(A)
    one.clock.seconds += 61
    one.put(B)
    assert queue.asked == [A]
    queue.written()
    one.put(C)
    assert one.tier.used_bytes == 2 * PAGE and one.events.of("evicted") == ["expired"]


def test_all_that_is_dirty_is_written_at_the_end(make: Make) -> None:
    one, queue = make(pages=8), Queue()
    one.tier.write_back.write = queue
    for key in (A, B, C):
        one.put(key)
    one.put(D, dirty=False)
    one.tier.pin([B], True)
    assert one.tier.write_back_all(one.clock.seconds)
    assert queue.asked == [B, C, A], "the pinned and the recent first"
    queue.written()


def test_what_cannot_be_written_at_the_end_is_said_to_be_lost(make: Make) -> None:
    one, queue = make(pages=8), Queue(None)
    one.tier.write_back.write = queue
    one.put(A)
    one.put(B)
    assert not one.tier.write_back_all(one.clock.seconds)
    one.tier.close()
    assert one.events.of("dropped") == ["closed before it was written"] * 2 and one.tier.used_bytes == 0


def test_a_raising_write_back_loses_nothing(make: Make) -> None:
    one = make(pages=2)

    def write_back(key: ChunkKey, loaded: Loaded) -> bool | None:
        raise OSError("no")

    one.tier.write_back.write = write_back
    assert one.put(A) and one.put(B) and one.put(C) is None
    assert one.has(A, B) == [True, True]
    one.tier.write_back.write = Queue(False)
    for key in (C, D):
        one.put(key)
    assert one.has(C, D) == [True, True]
