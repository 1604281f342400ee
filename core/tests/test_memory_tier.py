"""The memory tier: who goes and who stays, for every reason that there is, and nothing lost on the way."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloom import Chunk, ChunkKey, Event, MemoryFormat
from kvloom.events import EventBus
from kvloom.memory import Pool
from kvloom.runtime import SystemRuntime
from kvloom.tiers.base import Layout, Loaded
from kvloom.tiers.memory import MemoryTier

PAGE = 4096


class Clock(SystemRuntime):
    """The real runtime with a clock that is set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 1000.0

    def now(self) -> float:  # type: ignore[override]
        return self.seconds

    wall = now  # type: ignore[assignment]


class Events(EventBus):
    """Counts, and remembers in order."""

    def __init__(self, runtime: Clock) -> None:
        super().__init__((), runtime)
        self.seen: list[Event] = []

    def emit(self, event: Event) -> None:
        self.seen.append(event)

    def of(self, name: str) -> list[str]:
        return [event.reason for event in self.seen if event.name == name]


def key_of(number: int, tenant: str = "-") -> ChunkKey:
    return ChunkKey(f"f/{tenant}", number, number.to_bytes(32, "big"))


class Tier:
    """A memory tier of `pages` chunks of one page, and short words for what the tests do with it."""

    def __init__(self, pages: int, **settings: Any) -> None:
        self.clock = Clock()
        self.events = Events(self.clock)
        self.pool = Pool(pages * PAGE, self.clock)
        layout = Layout(MemoryFormat.KV_BLOB, torch.uint8, lambda tokens: (2, 1, tokens, PAGE // 8))
        self.tier = MemoryTier(layout, self.pool, self.events, self.clock, **settings)

    def put(self, key: ChunkKey, *, fidelity: str = "exact", pages: int = 1, keep: bool = False, **how: Any) -> Any:
        room = self.tier.reserve(pages * PAGE)
        if room is None:
            return None
        chunk = Chunk(room.tensor((2, 1, 4 * pages, PAGE // 8), torch.uint8), MemoryFormat.KV_BLOB, 4, fidelity)
        chunk.tensor.fill_(key.depth % 256)
        block = room.seal()
        assert block is not None
        loaded = self.tier.insert(key, chunk, block, **how)
        if keep:
            return loaded
        loaded.release()
        return True

    def has(self, *keys: ChunkKey) -> list[bool]:
        return self.tier.find(keys)


@pytest.fixture
def make():
    made: list[Tier] = []

    def make(pages: int = 4, **settings: Any) -> Tier:
        made.append(Tier(pages, **settings))
        return made[-1]

    yield make
    for one in made:
        one.tier.close()
        one.pool.close()
        assert one.pool.leaked == 0


Make = Callable[..., Tier]
A, B, C, D, E, F = (key_of(number) for number in range(6))


class Queue:
    """A write queue under a tier's `write_back` that does what the test says, and keeps what it was given."""

    def __init__(self, verdict: bool | None = True) -> None:
        self.verdict = verdict
        self.asked: list[ChunkKey] = []
        self.taken: dict[ChunkKey, Loaded] = {}

    def __call__(self, key: ChunkKey, loaded: Loaded) -> bool | None:
        self.asked.append(key)
        if self.verdict:
            assert key not in self.taken, "offered twice"
            self.taken[key] = loaded
        return self.verdict

    def written(self) -> None:
        """All that was taken on is written."""
        while self.taken:
            self.taken.popitem()[1].release()


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
    room = one.tier.reserve(PAGE)
    assert room is not None and one.tier.chunks() == [A, C]
    room.abandon()


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
    assert one.tier.used_bytes == PAGE and one.tier._held.pinned_bytes == 0


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
    assert not one.tier._held._tenants._bytes, "nor are they counted"


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
    tenants = one.tier._held._tenants
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
    assert one.tier._held.pinned_bytes == 3 * PAGE
    one.tier.pin([A, B, C], False)
    assert one.tier.chunks() == [D, C, B, A] and one.tier._held.pinned_bytes == 0


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
    room = one.tier.reserve(4 * PAGE)
    assert room is not None
    assert 64 - len(one.tier) <= 4 + 4, "by age alone it takes 33"
    room.abandon()


def test_what_lies_beside_the_gap_stays_if_it_may_not_go(make: Make) -> None:
    one = make(pages=64)
    keys = [key_of(number) for number in range(64)]
    for key in keys:
        one.put(key)
    one.tier.touch(keys[1::2])
    one.tier.pin(keys[1:32:4], True)
    held = one.tier.lease(keys[3:32:4])
    room = one.tier.reserve(8 * PAGE)
    assert room is not None and all(one.has(*keys[1:32:2]))
    room.abandon()
    for loaded in held:
        loaded.release()


def test_what_is_free_again_is_found_however_many_are_in_use(make: Make) -> None:
    one = make(pages=60)
    for number in range(60):
        one.put(key_of(number))
    held = one.tier.lease([key_of(number) for number in range(60)])
    assert one.tier.reserve(PAGE) is None
    held[45].release()
    room = one.tier.reserve(PAGE)
    assert room is not None and not one.tier.contains(key_of(45))
    room.abandon()
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
    assert one.has(A, B, C) == [True, False, True] and one.tier._held.pinned_bytes == PAGE


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
    room = tier.reserve(PAGE)
    assert room is not None
    chunk = Chunk(room.tensor((PAGE,), torch.uint8), MemoryFormat.KV_BLOB, 4)
    loaded = tier.insert(A, chunk, room.seal())
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


# -- writing back ------------------------------------------------------------------------------------------------------


def test_the_coldest_part_is_written_ahead_of_need(make: Make) -> None:
    one, queue = make(pages=16), Queue()
    one.tier.write_back = queue
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
    one.tier.write_back = queue
    one.put(A)
    one.put(B)
    assert one.put(C) is None and one.has(A, B) == [True, True]
    room = one.tier.reserve_by(PAGE, one.clock.seconds)
    assert room is not None and one.has(A, B) == [False, True]
    assert one.events.of("dropped") == ["evicted before it was written"]
    room.abandon()


def test_being_written_it_stays_until_the_write_is_over(make: Make) -> None:
    one, queue = make(pages=2), Queue()
    one.tier.write_back = queue
    one.put(A)
    one.put(B)
    assert one.put(C) is None and set(queue.taken) == {A, B} and one.has(A, B) == [True, True]
    threading.Timer(0.05, queue.written).start()
    real = SystemRuntime()
    began = real.now()
    one.clock.now = lambda: one.clock.seconds + real.now() - began  # type: ignore[method-assign]
    one.pool.now = one.clock.now
    room = one.tier.reserve_by(PAGE, one.clock.now() + 30)
    assert room is not None and one.has(A, B) == [False, True] and one.events.of("dropped") == []
    room.abandon()


def test_what_will_never_be_written_is_evicted_at_once(make: Make) -> None:
    one, queue = make(pages=2), Queue(False)
    one.tier.write_back = queue
    for key in (A, B, C):
        assert one.put(key)
    assert one.has(A, B, C) == [False, True, True]


def test_a_clean_or_lossy_chunk_is_never_offered(make: Make) -> None:
    one, queue = make(pages=2), Queue()
    one.tier.write_back = queue
    one.put(A, dirty=False)
    one.put(B, fidelity="signs")
    for key in (C, D):
        one.put(key, dirty=False)
    assert queue.asked == [] and one.has(C, D) == [True, True]


def test_clean_chunks_make_room_where_dirty_ones_cannot(make: Make) -> None:
    one, queue = make(pages=3), Queue(None)
    one.tier.write_back = queue
    one.put(A)
    one.put(B)
    one.put(C, dirty=False)
    assert one.put(D, dirty=False) and one.has(A, B, C) == [True, True, False]


def test_making_room_looks_past_what_is_dirty_or_in_use(make: Make) -> None:
    one, queue = make(pages=3), Queue(None)
    one.tier.write_back = queue
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

    one.tier.write_back = write_back
    one.tier.remove([A])
    one.put(A)
    if A not in queue.asked:
        one.put(B, dirty=False)
        one.put(D, dirty=False)
    order = one.tier._held.recency if quota is None else one.tier._held._tenants.recency(A)
    assert order.keys()[0] == A and not order._aside
    one.tier.write_back = Queue(False)
    one.put(E)
    one.put(F)
    assert not one.tier.contains(A)


def test_a_chunk_stored_again_while_it_leaves_stays(make: Make) -> None:
    one, queue = make(pages=16, quota={"*": 2 * PAGE}), Queue()
    one.tier.write_back = queue
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
    one.tier.write_back = queue
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
    one.tier.write_back = queue
    for number in range(8):
        one.put(key_of(number))
    queue.written()
    assert Counter(queue.asked)[A] == 1
    one.tier.touch([A])
    one.tier.lost_below([A, key_of(99)])
    for number in range(10, 30):
        one.put(key_of(number))
        queue.written()
    assert Counter(queue.asked)[A] == 2 and not one.tier.contains(A)


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

        one.tier.write_back = write_back
        one.put(A)
        one.put(B)
        one.put(C)
        remover[0].join(10)
        assert removed.is_set() and not one.tier.contains(A)
        one.tier.write_back = None
        one.tier.remove([B, C])
        assert one.tier.used_bytes == 0


def test_a_removed_chunk_in_the_queue_is_only_its_writers(make: Make) -> None:
    one, queue = make(pages=2), Queue()
    one.tier.write_back = queue
    one.put(A)
    one.put(B)
    assert one.tier.remove([A]) == 1
    assert one.tier.used_bytes == 2 * PAGE, "its writer reads it"
    queue.written()
    assert one.tier.used_bytes == PAGE and one.has(A) == [False]


def test_a_quota_hands_on_before_it_evicts(make: Make) -> None:
    one, queue = make(pages=16, quota={"*": 2 * PAGE}), Queue()
    one.tier.write_back = queue
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
    one.tier.write_back = queue
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
    one.tier.write_back = queue
    one.put(A)
    assert queue.asked == [A] and len(one.tier) == 0
    queue.written()
    queue.verdict = None
    one.put(B)
    assert one.tier.used_bytes == 0
    assert one.events.of("dropped") == ["not kept in memory, and no room to write it"]


def test_an_expired_dirty_chunk_is_handed_on(make: Make) -> None:
    one, queue = make(ttl=60), Queue()
    one.tier.write_back = queue
    one.put(A)
    one.clock.seconds += 61
    one.put(B)
    assert queue.asked == [A]
    queue.written()
    one.put(C)
    assert one.tier.used_bytes == 2 * PAGE and one.events.of("evicted") == ["expired"]


def test_all_that_is_dirty_is_written_at_the_end(make: Make) -> None:
    one, queue = make(pages=8), Queue()
    one.tier.write_back = queue
    for key in (A, B, C):
        one.put(key)
    one.put(D, dirty=False)
    one.tier.pin([B], True)
    assert one.tier.write_back_all(one.clock.seconds)
    assert queue.asked == [B, C, A], "the pinned and the recent first"
    queue.written()


def test_what_cannot_be_written_at_the_end_is_said_to_be_lost(make: Make) -> None:
    one, queue = make(pages=8), Queue(None)
    one.tier.write_back = queue
    one.put(A)
    one.put(B)
    assert not one.tier.write_back_all(one.clock.seconds)
    one.tier.close()
    assert one.events.of("dropped") == ["closed before it was written"] * 2 and one.tier.used_bytes == 0


def test_a_raising_write_back_loses_nothing(make: Make) -> None:
    one = make(pages=2)

    def write_back(key: ChunkKey, loaded: Loaded) -> bool | None:
        raise OSError("no")

    one.tier.write_back = write_back
    assert one.put(A) and one.put(B) and one.put(C) is None
    assert one.has(A, B) == [True, True]
    one.tier.write_back = Queue(False)
    for key in (C, D):
        one.put(key)
    assert one.has(C, D) == [True, True]


# -- all of it together ------------------------------------------------------------------------------------------------

KEYS = [key_of(number, tenant) for tenant in "abc" for number in range(8)]
QUOTA = {"a": 3 * PAGE, "b": 5 * PAGE}


class MemoryTierRules(RuleBasedStateMachine):
    """Any order of everything: accounts agree after each step, and nothing that may not go is gone."""

    @st.composite
    @staticmethod
    def _settings(draw: Any) -> dict[str, Any]:
        return {
            "ttl": draw(st.sampled_from([None, 50.0])),
            "quota": draw(st.sampled_from([None, QUOTA, {"*": 4 * PAGE}])),
        }

    def __init__(self) -> None:
        super().__init__()
        self.one: Tier | None = None
        self.queue = Queue()
        self.leases: list[tuple[ChunkKey, Any]] = []
        self.rooms: list[Any] = []
        self.pinned: set[ChunkKey] = set()

    @precondition(lambda self: self.one is None)
    @rule(settings=_settings(), writes=st.booleans())
    def open(self, settings: dict[str, Any], writes: bool) -> None:
        self.one = Tier(10, **settings)
        if writes:
            self.one.tier.write_back = self.queue

    def teardown(self) -> None:
        if self.one is None:
            return
        for _, loaded in self.leases:
            loaded.release()
        for room in self.rooms:
            room.abandon()
        self.queue.written()
        self.one.tier.close()
        assert self.one.pool.used_bytes == 0, "every page came back"
        self.one.pool.close()
        assert self.one.pool.leaked == 0

    opened = precondition(lambda self: self.one is not None)

    @opened
    @rule(
        key=st.sampled_from(KEYS),
        exact=st.booleans(),
        keep=st.booleans(),
        dirty=st.booleans(),
        age=st.sampled_from([0, 20, 60]),
        pages=st.integers(1, 3),
    )
    def insert(self, key: ChunkKey, exact: bool, keep: bool, dirty: bool, age: float, pages: int) -> None:
        written = self.one.clock.seconds - age
        fidelity = "exact" if exact else "signs"
        got = self.one.put(key, fidelity=fidelity, keep=keep, dirty=dirty, written=written, pages=pages)
        if got is not None and keep:
            self.leases.append((key, got))
        if got is None:
            self.check_full(pages)

    def check_full(self, pages: int) -> None:
        """A reservation was refused, so nothing that nobody uses and nothing forbids to evict is left."""
        if self.one.tier.write_back is None:
            held = self.one.tier._held.entries
            assert [key for key, one in held.items() if not one.pinned and not one.block.leased] == []

    @opened
    @rule(key=st.sampled_from(KEYS))
    def lease(self, key: ChunkKey) -> None:
        (loaded,) = self.one.tier.lease([key])
        assert (loaded is not None) == self.one.tier.contains(key)
        if loaded is not None:
            assert int(loaded.chunk.tensor.flatten()[0]) == key.depth, "its own bytes"
            self.leases.append((key, loaded))

    @opened
    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key, loaded = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        assert set(loaded.chunk.tensor.flatten().tolist()) == {key.depth}, "what is leased does not change"
        loaded.release()

    @opened
    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def touch(self, keys: list[ChunkKey]) -> None:
        self.one.tier.touch(keys)

    @opened
    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3), pinned=st.booleans())
    def pin(self, keys: list[ChunkKey], pinned: bool) -> None:
        self.one.tier.pin(keys, pinned)

    @opened
    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3))
    def remove(self, keys: list[ChunkKey]) -> None:
        self.one.tier.remove(keys)
        assert not any(self.one.tier.contains(key) for key in keys)

    @opened
    @rule(pages=st.integers(1, 4), late=st.booleans())
    def reserve(self, pages: int, late: bool) -> None:
        pinned = {key for key, held in self.one.tier._held.entries.items() if held.pinned}
        expired = {key for key in pinned if not self.one.tier.contains(key)}
        tier = self.one.tier
        room = tier.reserve_by(pages * PAGE, self.one.clock.seconds) if late else tier.reserve(pages * PAGE)
        assert all(key in tier._held.entries for key in pinned - expired), "pinned ones stay"
        if room is not None:
            room.tensor((pages * PAGE,), torch.uint8).fill_(255)  # whoever still looked at it would see
            self.rooms.append(room)

    @opened
    @precondition(lambda self: self.rooms)
    @rule()
    def abandon(self) -> None:
        self.rooms.pop().abandon()

    @opened
    @rule(verdict=st.sampled_from([True, None, False]))
    def write_queue(self, verdict: bool | None) -> None:
        self.queue.written()
        self.queue.verdict = verdict

    @opened
    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        self.one.clock.seconds += seconds

    @invariant()
    def accounts_agree(self) -> None:
        if self.one is None:
            return
        held = self.one.tier._held
        entries = held.entries
        assert held.pinned_bytes == sum(one.block.size for one in entries.values() if one.pinned)
        assert sorted(held.recency.keys()) == sorted(key for key, one in entries.items() if not one.pinned)
        assert sorted(held.keys()) == sorted(entries)
        assert {one.block.start: key for key, one in entries.items()} == held._starts
        assert {one.block.start + one.block.size: key for key, one in entries.items()} == held._ends
        aside = held.recency._aside.values()
        assert held.recency.aside_bytes == sum(one.block.size for one in aside)
        assert not any(one.dirty for one in aside)
        if held._ages is not None:
            assert sum(map(len, held._ages._buckets.values())) == len(entries)
        self.quotas_hold()
        blocks = {id(one.block): one.block.size for one in entries.values()}
        blocks |= {id(loaded.lease.block): loaded.lease.block.size for _, loaded in self.leases}
        blocks |= {id(loaded.lease.block): loaded.lease.block.size for loaded in self.queue.taken.values()}
        assert self.one.pool.used_bytes == sum(blocks.values()) + sum(room.size for room in self.rooms)

    def quotas_hold(self) -> None:
        tenants = self.one.tier._held._tenants
        if tenants is None:
            return
        sums: Counter[str] = Counter()
        for key, one in self.one.tier._held.entries.items():
            if not one.leaving:
                sums[key.namespace[2:]] += one.block.size
        counted = {tag: nbytes for tag, nbytes in sums.items() if tenants.quota(tag) is not None}
        assert tenants._bytes == counted and set(tenants._recency) == set(counted)
        assert all(nbytes <= tenants.quota(tag) for tag, nbytes in counted.items())


TestMemoryTierRules = MemoryTierRules.TestCase
TestMemoryTierRules.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
