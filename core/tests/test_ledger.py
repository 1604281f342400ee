"""The ledger: what is held, how much it is, who goes first, and what a listing brings back."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256

import pytest
from core_support import PromptLedger as Ledger
from hypothesis import given
from hypothesis import strategies as st

from kvloom import ChunkKey, Entry
from kvloom.runtime import Lock, SystemRuntime
from kvloom.tiers.chain import Chain
from kvloom.tiers.ledger import Fidelity, Victim
from kvloom.tiers.ledger import Ledger as SlowLedger
from kvloom.tiers.rings import Links, Ring
from kvloom.tiers.rows import FREE, Rows

NAMESPACE = f"{'f' * 32}/-"
START = 1_000_000.0
EXACT = Fidelity.EXACT


class Clock(SystemRuntime):
    """A wall clock that stands still until it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.time = START

    def wall(self) -> float:  # type: ignore[override]
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


def key(name: object, *, depth: int = 0, tag: str = "-") -> ChunkKey:
    return ChunkKey(f"{'f' * 32}/{tag}", depth, sha256(f"{tag}/{name}".encode()).digest())


def chain_of(name: str, count: int, *, tag: str = "-") -> list[ChunkKey]:
    return [key(f"{name}{depth}", depth=depth, tag=tag) for depth in range(count)]


def write(ledger: Ledger, one: ChunkKey, nbytes: int = 1) -> list[ChunkKey]:
    """What a tier does to write a blob; who had to go."""
    ledger.expect(one)
    victims = ledger.admit(one, nbytes)
    assert victims is not None
    ledger.note(one, EXACT, nbytes=nbytes)
    return [victim.key for victim in victims]


def entry(one: ChunkKey, modified: float, *, nbytes: int = 1, used: float = 0.0) -> Entry:
    return Entry(str(one), nbytes, modified, used)


def held(ledger: Ledger) -> set[ChunkKey]:
    return set(ledger.names())


def order_of_going(ledger: Ledger) -> list[ChunkKey]:
    gone: list[ChunkKey] = []
    while victims := ledger.release(1):
        gone += [victim.key for victim in victims]
    return gone


# -- who goes first ----------------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first_and_tails_before_heads(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=6)
    a, b = chain_of("a", 3), chain_of("b", 3)
    for one in a + b:
        assert write(ledger, one) == []
    ledger.touch(b)
    ledger.touch(a)
    assert ledger.names() == [*reversed(b), *reversed(a)]
    assert write(ledger, key("c")) == [b[2]]
    assert write(ledger, key("d"), 3) == [b[1], b[0], a[2]]
    assert ledger.bytes == 6 and len(ledger) == 4


def test_a_chain_that_was_used_in_part_moves_in_part(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=100)
    a = chain_of("a", 4)
    for one in a:
        write(ledger, one)
    ledger.touch(a)
    ledger.touch([a[0], key("not held"), a[2], a[0]])
    assert ledger.names() == [a[3], a[1], a[2], a[0]]
    ledger.touch([])
    ledger.touch([key("not held")])
    assert ledger.names() == [a[3], a[1], a[2], a[0]]


def test_what_is_larger_than_the_capacity_is_refused_and_nothing_goes_for_it(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=10)
    write(ledger, key("a"), 10)
    ledger.expect(key("b"))
    assert ledger.admit(key("b"), 11) is None
    ledger.forget_pending(key("b"))
    assert ledger.names() == [key("a")] and ledger.bytes == 10


def test_what_is_being_written_is_nobodys_victim_and_keeps_its_place(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=3)
    tail, head, later = key("tail", depth=1), key("head"), key("later")
    ledger.expect(tail)
    ledger.expect(head)
    ledger.touch([head, tail])
    assert ledger.known([head, tail]) == [None, None] and ledger.bytes == 0 and len(ledger) == 0
    write(ledger, later, 2)
    assert ledger.admit(head, 1) == []
    assert ledger.bytes == 3 and len(ledger) == 2 and ledger.known([head]) == [None]
    assert ledger.admit(tail, 1) == [Victim(later, 2, "capacity")]
    assert ledger.admit(key("more"), 2) == [], "there is nobody who could go"
    assert ledger.bytes == 4
    ledger.note(head, EXACT)
    ledger.note(tail, EXACT)
    ledger.note(key("more"), EXACT)
    assert ledger.names() == [tail, head, key("more")]
    assert [victim.key for victim in ledger.release(1)] == [tail], "the tail is older, though it was there later"


def test_a_blob_that_is_written_over_is_known_meanwhile_and_stays(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=4)
    a, b = key("a"), key("b")
    ledger.note(a, Fidelity.LOSSY, nbytes=2)
    write(ledger, b, 2)
    assert ledger.admit(a, 4) == [Victim(b, 2, "capacity")]
    assert ledger.known([a, b]) == [Fidelity.LOSSY, None]
    ledger.forget_absent(a)
    ledger.forget_pending(a)
    assert ledger.release(9) == []
    ledger.note(a, EXACT)
    assert ledger.known([a]) == [EXACT] and ledger.bytes == 4 and len(ledger) == 1
    assert ledger.release(9) == [Victim(a, 4, "capacity")]


def test_forgetting(clock: Clock) -> None:
    ledger = Ledger(clock)
    pending, admitted, there = key("pending"), key("admitted"), key("there")
    ledger.expect(pending)
    ledger.admit(admitted, 5)
    write(ledger, there, 7)
    for one in (pending, admitted):
        ledger.forget_absent(one)
    for one in (admitted, there, key("unknown")):
        ledger.forget_pending(one)
    assert held(ledger) == {pending, admitted, there} and ledger.bytes == 12 and len(ledger) == 2
    ledger.forget_pending(pending)
    ledger.forget_absent(there)
    ledger.forget_absent(key("unknown"))
    assert held(ledger) == {admitted} and ledger.bytes == 5
    ledger.forget([admitted, admitted, key("unknown")])
    assert held(ledger) == set() and ledger.bytes == 0 and len(ledger) == 0 and ledger.tenants() == {}


def test_expecting_again_does_not_change_what_is_there(clock: Clock) -> None:
    ledger = Ledger(clock)
    write(ledger, key("a"), 7)
    ledger.expect(key("a"))
    assert ledger.known([key("a")]) == [EXACT] and ledger.bytes == 7


@pytest.mark.parametrize("fidelity", [Fidelity.UNKNOWN, EXACT, Fidelity.LOSSY, Fidelity.UNREADABLE])
def test_what_was_found_out_is_known(clock: Clock, fidelity: Fidelity) -> None:
    ledger = Ledger(clock)
    ledger.note(key("a"), fidelity)
    assert ledger.known([key("b"), key("a")]) == [None, fidelity] and len(ledger) == 1 and ledger.bytes == 0
    ledger.note(key("a"), fidelity, nbytes=5)
    ledger.note(key("a"), fidelity)
    assert ledger.bytes == 5


def test_nothing_of_a_chain_goes_for_what_is_behind_it(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=4)
    others, keys = chain_of("o", 2), chain_of("c", 6)
    for one in [*others, *keys[:2]]:
        write(ledger, one)
    chain = Chain(keys)
    assert ledger.admit(keys[2], 2, chain) == [Victim(one, 1, "capacity") for one in others]
    ledger.note(keys[2], EXACT)
    assert ledger.admit(keys[3], 1, chain) is None, "the head would go"
    assert held(ledger) == set(keys[:3]) and ledger.bytes == 4, "and nothing goes for what does not come in"
    assert ledger.admit(keys[2], 3, chain) is None and ledger.admit(keys[2], 2, chain) == [], "nor for one that grows"
    ledger.note(keys[2], EXACT)
    ledger.forget(keys[:1])
    write(ledger, key("x"))
    assert ledger.admit(keys[0], 1, Chain(keys)) == [Victim(key("x"), 1, "capacity")], "what is used now stays"
    ledger.note(keys[0], EXACT)
    ledger.forget(keys[1:2])
    assert ledger.admit(keys[1], 2, Chain(keys)) == [Victim(keys[2], 2, "capacity")], "what is behind makes room"
    ledger.enforced = False
    assert ledger.admit(keys[5], 9 - 5, chain) == [], "who does not evict says nothing"


def test_what_is_being_written_does_not_go_for_what_is_behind_it_either(clock: Clock) -> None:
    """Nobody could go at the moment; once the first was written, it would."""
    ledger = Ledger(clock, capacity=9, quota={"-": 2})
    keys = chain_of("c", 4)
    chain = Chain(keys)
    assert ledger.admit(keys[0], 1, chain) == [] and ledger.admit(keys[1], 1, chain) == []
    assert ledger.admit(keys[2], 1, chain) is None
    ledger.note(keys[0], EXACT)
    assert ledger.excess(keys[0]) == [] and ledger.admit(keys[2], 1, chain) is None
    other = key("other")
    assert ledger.admit(other, 1, chain) == [Victim(keys[0], 1, "quota")], "what is in no chain goes by use alone"


@pytest.mark.parametrize("quota", [None, {"*": 100}])
def test_a_tail_that_comes_later_goes_before_its_head(clock: Clock, quota: dict[str, int] | None) -> None:
    ledger = Ledger(clock, capacity=100, quota=quota)
    a, b = chain_of("a", 4), chain_of("b", 2)
    for one in (a[0], b[0], a[1], b[1]):  # as memory lets go of them
        ledger.expect(one, Chain(a if one in a else b))
        assert ledger.admit(one, 1) == []
        ledger.note(one, EXACT, nbytes=1)
    ledger.expect(a[3], Chain(a))  # nothing is known of what is before it
    assert ledger.admit(a[3], 1) == []
    ledger.note(a[3], EXACT, nbytes=1)
    assert order_of_going(ledger) == [a[1], a[0], b[1], b[0], a[3]]


def test_the_place_behind_what_is_before_is_found_in_any_order() -> None:
    a = chain_of("a", 4)
    assert [Chain(a[1:]).previous(one) for one in a] == [None, None, a[1], a[2]]
    mixed = Chain([a[2], a[0], a[3], a[1]])  # as `load` and `save` may be given them: never a chunk itself
    assert [mixed.previous(one) for one in a] == [None, None, None, a[2]]
    assert Chain([a[0], *chain_of("a", 2, tag="other")]).previous(chain_of("a", 2, tag="other")[1]) is None
    assert Chain().previous(a[1]) is None


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 3)), max_size=20),
    st.integers(2, 12),
    st.none() | st.integers(1, 6),
    st.data(),
)
def test_there_is_never_a_tail_without_its_head(
    stores: list[tuple[int, int, int]], capacity: int, quota: int | None, data: st.DataObject
) -> None:
    """Prompts of several tenants, some longer than all there is, each written by a few threads, in about its order."""
    ledger = Ledger(Clock(), capacity=capacity, quota=quota and {"a": quota})
    chains = [chain_of(f"c{number}-", 9, tag="ab"[number % 2]) for number in range(4)]
    for number, length, threads in stores:
        keys = chains[number][:length]
        chain = Chain(keys)
        ledger.touch(keys)
        todo = [one for one, known in zip(keys, ledger.known(keys), strict=True) if known is None]
        writing: list[ChunkKey] = []
        for one in todo:
            ledger.expect(one)
        for place in range(len(todo) - 1):
            if threads > 1 and data.draw(st.booleans()):  # a thread was faster than another
                todo[place : place + 2] = reversed(todo[place : place + 2])
        for one in [*todo, None]:
            while len(writing) == threads or (one is None and writing):
                done = writing.pop(data.draw(st.integers(0, len(writing) - 1)))
                ledger.note(done, EXACT)
                ledger.deleted(ledger.excess(done, chain))
            if one is not None:
                if ledger.admit(one, 1, chain) is None:
                    ledger.forget_pending(one)
                else:
                    writing.append(one)
        ledger.touch(keys)
        assert ledger.bytes <= capacity and all(
            n <= quota for tag, n in ledger.tenants().items() if quota and tag == "a"
        )
        for each in chains:
            there = [known is not None for known in ledger.known(each)]
            assert there == sorted(there, reverse=True), "a hole"
        assert held(ledger) & set(keys), "something of what was used last is there"


def test_release_takes_what_is_worth_so_many_bytes(clock: Clock) -> None:
    ledger = Ledger(clock)
    for name in "abcd":
        write(ledger, key(name), 10)
    assert ledger.release(11) == [Victim(key("a"), 10, "capacity"), Victim(key("b"), 10, "capacity")]
    assert ledger.bytes == 20


# -- tenants -----------------------------------------------------------------------------------------------------------


def test_a_tenant_over_its_quota_evicts_its_own(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=10, quota={"*": 2, "big": 5})
    one, two, three = (key(name, tag="small") for name in "abc")
    write(ledger, one)
    write(ledger, two)
    for name in "abcde":
        assert write(ledger, key(name, tag="big")) == []
    assert ledger.admit(three, 1) == [Victim(one, 1, "quota")]
    ledger.note(three, EXACT)
    assert ledger.tenants() == {"small": 2, "big": 5}
    assert ledger.admit(key("f", tag="big"), 6) is None
    assert ledger.admit(key("f", tag="other"), 3) is None
    ledger.touch([key("a", tag="big"), two])
    assert write(ledger, key("f", tag="big"), 2) == [key("b", tag="big"), key("c", tag="big")]
    assert write(ledger, key("d", tag="small")) == [three], "the other was used since"
    assert ledger.tenants() == {"small": 2, "big": 5}


def test_a_quota_counts_over_all_fingerprints(clock: Clock) -> None:
    ledger = Ledger(clock, quota={"t": 2})
    keys = [ChunkKey(f"{name * 32}/t", 0, sha256(name.encode()).digest()) for name in "abc"]
    for one in keys:
        write(ledger, one)
    assert ledger.names() == keys[1:] and ledger.tenants() == {"t": 2}
    ledger.touch([keys[2], keys[1]])
    assert write(ledger, keys[0]) == [keys[1]], "chains may be mixed as they like"
    for other in range(3):
        write(ledger, key(other), 100)
    assert ledger.tenants() == {"t": 2, "-": 300}, "who is not named, and is not '*', has no quota"


def test_nothing_is_kept_of_namespaces_that_are_gone(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=4, quota={"*": 3}, ttl=60.0)
    for tag in range(10_000):
        write(ledger, key("a", tag=str(tag)))
        if tag % 100 == 0:
            assert len(ledger.names()) == len(ledger)
    assert len(ledger.tenants()) == len(ledger) == 4
    assert len(ledger._held.tenants.namespaces) <= 8
    assert ledger._rows.end < 100


# -- time --------------------------------------------------------------------------------------------------------------


def test_what_is_past_its_time_is_not_known_and_is_handed_out_oldest_first(clock: Clock) -> None:
    ledger = Ledger(clock, ttl=1000.0)
    for age, name in ((900.0, "b"), (990.0, "a"), (0.0, "d"), (500.0, "c")):
        write(ledger, key(name), 3)
        ledger.note(key(name), EXACT, written=START - age)
    clock.time = START + 9.9
    assert ledger.known([key("a"), key("b")]) == [EXACT, EXACT] and ledger.expire() == []
    clock.time = START + 10
    assert ledger.known([key("a"), key("b")]) == [Fidelity.EXPIRED, EXACT]
    clock.time = START + 12
    assert ledger.expire() == [Victim(key("a"), 3, "expired")]
    assert ledger.expire() == [] and ledger.bytes == 9
    clock.time = START + 5000
    assert [victim.key for victim in ledger.expire(limit=2)] == [key("b"), key("c")]
    assert [victim.key for victim in ledger.expire(limit=2)] == [key("d")]
    assert len(ledger) == ledger.bytes == 0


def test_when_a_blob_was_written_is_kept_until_it_is_written_again(clock: Clock) -> None:
    ledger = Ledger(clock, ttl=1000.0)
    a, b = key("a"), key("b")
    write(ledger, a)
    write(ledger, b)
    clock.time += 900
    ledger.note(a, EXACT)
    write(ledger, b)
    clock.time += 110
    assert ledger.known([a, b]) == [Fidelity.EXPIRED, EXACT]
    assert [victim.key for victim in ledger.expire()] == [a]


def test_what_is_past_its_time_but_being_written_again_stays(clock: Clock) -> None:
    ledger = Ledger(clock, ttl=1000.0)
    write(ledger, key("a"))
    clock.time += 2000
    ledger.note(key("b"), EXACT, nbytes=1, written=START)
    ledger.admit(key("a"), 1)
    assert ledger.expire() == [Victim(key("b"), 1, "expired")]
    ledger.note(key("a"), EXACT)
    assert ledger.known([key("a")]) == [EXACT] and ledger.expire() == []
    clock.time += 2000
    assert [victim.key for victim in ledger.expire()] == [key("a")]


def test_a_row_that_is_used_again_is_not_as_old_as_it_was(clock: Clock) -> None:
    ledger = Ledger(clock, ttl=1000.0)
    ledger.note(key("a"), EXACT, written=START - 900)
    ledger.forget([key("a")])
    ledger.note(key("b"), EXACT)
    clock.time += 500
    assert ledger.known([key("b")]) == [EXACT]


def test_a_row_that_is_used_again_is_in_no_order_of_before(clock: Clock) -> None:
    ledger = Ledger(clock, ttl=1000.0, quota={"*": 100})
    for name in "abcd":
        write(ledger, key(name))
    ledger.forget([key("b"), key("a")])
    for name in ("x", "y"):
        ledger.expect(key(name))
    for name in ("y", "x"):
        ledger.forget_pending(key(name))
    ledger.forget([key("c")])
    clock.time += 2000
    assert ledger.expire() == [Victim(key("d"), 1, "expired")] and ledger.expire() == []


def test_a_clock_ahead_of_ours_does_not_make_a_blob_live_longer(clock: Clock) -> None:
    ledger = Ledger(clock, ttl=1000.0)
    ledger.note(key("a"), EXACT, written=START + 1e9)
    others = [entry(key("b"), START + 1e9), entry(key("c"), float("nan"), used=float("inf"))]
    ledger.recover([entry(key("a"), START + 1e9), *others])
    clock.time += 1002
    assert ledger.known([key("a"), key("b"), key("c")]) == [Fidelity.EXPIRED] * 3
    assert len(ledger.expire()) == 3


def test_a_clock_ahead_of_ours_does_not_make_a_blob_recent_for_ever(clock: Clock) -> None:
    ledger = Ledger(clock)
    ledger.recover([entry(key("a"), START + 1e9), entry(key("b"), START - 5), entry(key("c"), START - 500)])
    clock.time += 1000
    ledger.recover([entry(key("a"), START + 800), entry(key("b"), START + 900), entry(key("c"), START - 500)])
    assert ledger.names() == [key("c"), key("a"), key("b")]
    assert ledger.unsaid(600, 10) == []
    ledger.touch([key("a")])
    clock.time += 1000
    assert ledger.unsaid(600, 10) == [key("a")]


def test_no_number_of_times_takes_many_slots(clock: Clock) -> None:
    ledger = Ledger(clock, ttl=1000.0)
    rng = random.Random(1)
    for index in range(5000):
        ledger.note(key(index), EXACT, nbytes=1, written=START - rng.uniform(0, 1e6))
    assert ledger._held.ages is not None and len(ledger._held.ages._slots) < 1100
    assert len(ledger.expire(limit=10_000)) > 4900


# -- a policy that counts ----------------------------------------------------------------------------------------------


def test_tiny_lfu_welcomes_what_is_used_more_than_what_would_go(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=2, policy="tiny_lfu", quota={"t": 1})
    often, seldom, new = key("often"), key("seldom"), key("new")
    assert ledger.welcome(often, 1), "there is room"
    write(ledger, often)
    write(ledger, seldom)
    for _ in range(3):
        ledger.touch([often])
    ledger.touch([seldom])
    assert ledger.names() == [often, seldom]
    ledger.touch([new])
    ledger.touch([new])
    assert not ledger.welcome(new, 1), "twice is less than three times"
    for _ in range(5):
        ledger.touch([new], count=False)
    assert not ledger.welcome(new, 1)
    ledger.touch([new])
    assert not ledger.welcome(new, 1), "as often is not more often"
    ledger.expect(new)
    assert not ledger.welcome(new, 1)
    ledger.forget_pending(new)
    assert ledger.welcome(often, 1), "it is there: it will be written over"
    ledger.touch([new])
    assert ledger.welcome(new, 1)
    assert ledger.release(1) and ledger.welcome(key("whatever"), 1), "there is room again"
    write(ledger, key("theirs", tag="t"))
    ledger.touch([key("theirs", tag="t")])
    assert ledger.release(1)
    assert not ledger.welcome(key("other", tag="t"), 1), "its quota has no room, and what is there was used"
    assert Ledger(clock, capacity=1).welcome(new, 5), "lru welcomes everybody"


def zipf_with_scans(*, seed: int) -> Iterator[int]:
    """Uses of 5,000 blobs, few of them most of the time; every so often a walk over blobs that never come again."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) ** 0.9 for rank in range(5000)]
    never = -1
    for _ in range(15):
        yield from rng.choices(range(5000), weights, k=1000)
        yield from range(never, never - 1000, -1)
        never -= 1000


def hit_rate(policy: str) -> float:
    ledger = Ledger(Clock(), capacity=300, policy=policy)
    hits = uses = 0
    for name in zipf_with_scans(seed=7):
        one = key(name)
        (known,) = ledger.known([one])
        ledger.touch([one])
        if name >= 0:
            hits += known is EXACT
            uses += 1
        if known is None and ledger.welcome(one, 1):
            write(ledger, one)
    assert ledger.bytes <= 300
    return hits / uses


def test_a_walk_over_what_is_used_once_does_not_flush_what_is_used_often() -> None:
    lru, tiny_lfu = hit_rate("lru"), hit_rate("tiny_lfu")
    assert tiny_lfu > lru + 0.1, (lru, tiny_lfu)


# -- a listing ---------------------------------------------------------------------------------------------------------


def test_what_is_listed_at_first_is_older_than_what_was_used_since(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=100)
    ledger.expect(key("expected"))
    write(ledger, key("used"), 5)
    old = [entry(key(name), START - age, used=used) for name, age, used in
           (("b", 500.0, 0.0), ("c", 900.0, START - 100), ("a", 1000.0, START - 900))]  # fmt: skip
    assert ledger.recover([*old, entry(key("used"), START - 9000, nbytes=77)]) == []
    assert ledger.complete
    assert ledger.names() == [key("a"), key("b"), key("c"), key("expected"), key("used")]
    assert ledger.known([key("a"), key("used"), key("expected")]) == [Fidelity.UNKNOWN, EXACT, None]
    assert len(ledger) == 4


def test_what_is_listed_at_first_is_older_than_what_was_passed_over(clock: Clock) -> None:
    ledger = Ledger(clock)
    ledger.expect(key("expected"))
    write(ledger, key("a"))
    assert ledger.release(1) == [Victim(key("a"), 1, "capacity")]
    ledger.recover([entry(key("listed"), START - 100)])
    assert ledger.names() == [key("listed"), key("expected")]
    assert ledger.release(1) == [Victim(key("listed"), 1, "capacity")]


def test_of_one_minute_the_deeper_is_the_older(clock: Clock) -> None:
    chain = chain_of("a", 50)
    minute = START // 60 * 60
    entries = [entry(one, minute + random.Random(one.depth).uniform(0, 59)) for one in chain]
    random.Random(1).shuffle(entries)
    ledger = Ledger(clock, capacity=10)
    clock.time += 3600
    victims = ledger.recover(entries)
    assert {victim.key for victim in victims} == set(chain[10:])
    assert order_of_going(ledger) == chain[9::-1]


def test_what_a_listing_has_too_much_is_returned_with_its_reason(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=10, quota={"t": 3}, ttl=1000.0)
    entries = [entry(key("expired"), START - 1000)]
    entries += [entry(key(age), START - 60 * age) for age in range(9)]
    entries += [entry(key(age, tag="t"), START - 60 * age) for age in range(5)]
    victims = ledger.recover(entries)
    assert {(victim.key, victim.reason) for victim in victims} == {
        (key("expired"), "expired"),
        (key(4, tag="t"), "quota"),
        (key(3, tag="t"), "quota"),
        (key(8), "capacity"),
        (key(7), "capacity"),
    }
    assert ledger.bytes == 10 and ledger.tenants() == {"-": 7, "t": 3}


@pytest.mark.parametrize("name", [
    "spec/abc.json", "", "a/b", f"{NAMESPACE}/0-{'0' * 63}", f"{NAMESPACE}/0-{'0' * 62} 0",
    f"{NAMESPACE}/00-{'0' * 64}",
    f"x/{NAMESPACE}/0-{'0' * 64}", f"{NAMESPACE}/{1 << 40}-{'0' * 64}", f"{NAMESPACE}/-1-{'0' * 64}",
    f"{NAMESPACE}/0-{'A' * 64}",
])  # fmt: skip
def test_what_is_not_ours_is_passed_over(clock: Clock, name: str) -> None:
    ledger = Ledger(clock, capacity=1)
    assert ledger.recover([Entry(name, 1000, START)]) == [] and len(ledger) == 0 and ledger.complete


@given(
    st.builds(
        "{}/{}-{}".format,
        st.sampled_from([NAMESPACE, "a/b", "/", "a/b/c", "a", "", "a/-b", "é/x", "//"]),
        st.integers(-5, 1 << 33) | st.sampled_from(["", "00", "+1", "1_0", " 1", "١", "0-1", "-0", "1-", "9" * 5000]),
        st.sampled_from(["0" * 64, "ab" * 32, "AB" * 32, "0" * 63, "0" * 62 + " 0", "0" * 66, "g" * 64, "", "é" * 64]),
    )
    | st.text(max_size=80)
)
def test_what_is_ours_is_what_is_a_key(text: str) -> None:
    ledger = Ledger(Clock())
    ledger.recover([Entry(text, -7, START)])
    try:
        expected = [ChunkKey.parse(text)]
    except ValueError:
        expected = []
    assert ledger.names() == [one for one in expected if one.depth < 1 << 31] and ledger.bytes == 0


def test_a_store_that_knows_no_times(clock: Clock) -> None:
    ledger = Ledger(clock, ttl=1000.0)
    assert ledger.recover([Entry(str(key("a")), 3, 0.0)]) == []
    assert ledger.known([key("a")]) == [Fidelity.UNKNOWN], "it may be young"
    clock.time += 1002
    assert ledger.known([key("a")]) == [Fidelity.EXPIRED]


def test_a_listing_that_fails_changes_nothing_that_matters(clock: Clock) -> None:
    ledger = Ledger(clock)
    write(ledger, key("a"))

    def failing() -> Iterator[Entry]:
        yield entry(key("b"), START)
        raise OSError("the store is gone")

    with pytest.raises(OSError, match="gone"):
        ledger.recover(failing())
    assert ledger.names() == [key("a")] and not ledger.complete
    ledger.recover([entry(key("b"), START), entry(key("a"), START)])
    assert ledger.names() == [key("b"), key("a")], "it was the first listing still"
    with pytest.raises(OSError, match="gone"):
        ledger.recover(failing())
    assert ledger.names() == [key("b"), key("a")] and ledger.complete


def test_a_later_listing_brings_what_others_did(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=100)
    names = ["gone", "same", "used", "rewritten"]
    ledger.recover([entry(key(name), START - 1000 + place) for place, name in enumerate(names)])
    for name in names:
        ledger.note(key(name), EXACT)
    write(ledger, key("ours"))
    ledger.expect(key("pending"))
    clock.time += 1000
    later = [
        entry(key("used"), START - 998, used=START + 600),
        entry(key("rewritten"), START + 300, nbytes=5),
        entry(key("new", depth=1), START + 301),
        entry(key("same"), START - 999, used=START - 990, nbytes=2),
        entry(key("ours"), START + 1, nbytes=3),
    ]
    assert ledger.recover(later) == []
    assert ledger.names() == [
        key("same"),
        key("ours"),
        key("pending"),
        key("new", depth=1),
        key("rewritten"),
        key("used"),
    ]
    assert ledger.known([key("used"), key("rewritten"), key("gone")]) == [EXACT, Fidelity.UNKNOWN, None]
    assert ledger.bytes == 1 + 5 + 1 + 2 + 3


def test_what_is_noted_while_a_listing_is_under_way_stays(clock: Clock) -> None:
    ledger = Ledger(clock)
    ledger.recover([entry(key(name), START - 500) for name in ("deleted", "noted", "expected", "forgotten")])
    clock.time += 1000

    def listing() -> Iterator[Entry]:
        yield entry(key("forgotten"), START - 500)
        yield entry(key("written again"), START - 500)
        ledger.note(key("noted"), EXACT, nbytes=7)
        ledger.expect(key("expected"))
        write(ledger, key("written"), 9)
        ledger.forget([key("forgotten")])
        write(ledger, key("written again"), 3)
        ledger.forget([key("written again")])
        write(ledger, key("written again"), 4)
        yield entry(key("noted"), START - 500, nbytes=1)

    assert ledger.recover(listing()) == []
    assert held(ledger) == {key(name) for name in ("noted", "expected", "written", "written again")}
    assert ledger.bytes == 7 + 1 + 9 + 4


def test_what_was_evicted_before_it_could_be_deleted_does_not_come_back(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=1)
    write(ledger, key("a"))
    assert write(ledger, key("b")) == [key("a")]
    listing = [entry(key("a"), START - 1), entry(key("b"), START)]
    assert ledger.recover(listing) == [] and ledger.names() == [key("b")]
    clock.time += 100
    others = [entry(key("a"), START + 50), entry(key("b"), START)]
    assert ledger.recover(others) == [Victim(key("b"), 1, "capacity")], "somebody wrote it again"


def test_what_turns_out_larger_than_it_was_thought_makes_others_go(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=5000, quota={"t": 3000})
    keys = [key(place) for place in range(2000)] + [key(place, tag="t") for place in range(3000)]
    assert ledger.recover(entry(one, START - 1000) for one in keys) == []
    ledger.touch(keys[::-1])
    clock.time += 100
    victims = ledger.recover(entry(one, START - 1000, nbytes=2) for one in keys)
    assert [victim.reason for victim in victims] == ["quota"] * 1500 + ["capacity"] * 1000
    assert [victim.key for victim in victims] == keys[2000:3500] + keys[:1000]
    assert ledger.bytes == 5000 and ledger.recover(iter(())) == [] and len(ledger) == 0


def test_what_was_found_before_it_was_listed_becomes_recent_when_others_use_it(clock: Clock) -> None:
    ledger = Ledger(clock)
    for name in "ab":
        ledger.note(key(name), EXACT, nbytes=1)
    ledger.recover([entry(key(name), START - 5000) for name in "ab"])
    assert ledger.names() == [key("a"), key("b")]
    clock.time += 1000
    ledger.recover([entry(key("b"), START - 5000), entry(key("a"), START - 5000, used=START - 500)])
    assert ledger.names() == [key("b"), key("a")] and ledger.known([key("a")]) == [EXACT]


def test_what_others_wrote_after_it_was_evicted_is_taken_in(clock: Clock) -> None:
    ledger = Ledger(clock)
    for name in "ab":
        write(ledger, key(name))
    ledger.release(2)
    clock.time += 100
    ledger.recover([entry(key("a"), START + 50), entry(key("b"), START)])
    assert held(ledger) == {key("a")}


def test_however_many_are_forgotten_while_a_listing_is_under_way(clock: Clock) -> None:
    ledger = Ledger(clock)
    keys = [key(place) for place in range(6000)]
    ledger.recover(entry(one, START - 5000) for one in keys)

    def listing() -> Iterator[Entry]:
        yield from (entry(one, START - 5000) for one in keys)
        ledger.forget(keys)

    ledger.recover(listing())
    assert len(ledger) == 0
    for place in range(6000):
        write(ledger, key(place))
        ledger.forget([key(place)])
    assert len(ledger._held.gone) == 4096


def test_three_hundred_listings(clock: Clock) -> None:
    ledger = Ledger(clock)
    for turn in range(300):
        clock.time += 1000
        ledger.recover([entry(key(turn), clock.time), entry(key("always"), START)])
        assert held(ledger) == {key(turn), key("always")}


def test_many_listed_blobs_have_their_order_across_slices(clock: Clock) -> None:
    keys = [key(place, depth=place % 7) for place in range(5000)]
    entries = [entry(one, 60.0 * place) for place, one in enumerate(keys, 1)]
    random.Random(3).shuffle(entries)
    clock.time = 1e9
    ledger = Ledger(clock, capacity=4000)
    assert {victim.key for victim in ledger.recover(entries)} == set(keys[:1000])
    assert ledger.names() == keys[1000:]
    ledger.recover([entry(one, 60.0 * place, used=1e6 + 60 * place) for place, one in enumerate(keys, 1) if place % 2])
    assert ledger.names() == [one for place, one in enumerate(keys, 1) if place % 2]


# -- telling the store -------------------------------------------------------------------------------------------------


def test_the_store_is_told_of_uses_once_in_a_while(clock: Clock) -> None:
    ledger = Ledger(clock)
    a = chain_of("a", 3)
    for one in a:
        write(ledger, one)
    ledger.touch([*a, key("not held")])
    assert ledger.unsaid(600, 100) == [], "they were written just now"
    clock.time += 700
    assert ledger.unsaid(600, 100) == [], "they were not used since"
    ledger.touch(a)
    assert ledger.unsaid(600, 100) == a
    ledger.touch(a)
    assert ledger.unsaid(600, 100) == []
    clock.time += 300
    ledger.touch(a)
    assert ledger.unsaid(600, 100) == []
    clock.time += 301
    assert ledger.unsaid(600, 100) == a, "used since, though a while ago"
    assert ledger.unsaid(0, 100) == []


def test_what_was_written_since_it_was_used_is_not_told(clock: Clock) -> None:
    ledger = Ledger(clock)
    ledger.recover([entry(key("a"), START - 9000)])
    ledger.touch([key("a")])
    clock.time += 1
    write(ledger, key("a"))
    clock.time += 700
    assert ledger.unsaid(600, 100) == []


def test_few_at_a_time_heads_first(clock: Clock) -> None:
    ledger = Ledger(clock)
    a, b = chain_of("a", 5), chain_of("b", 5)
    ledger.recover([entry(one, START - 9000) for one in a + b])
    ledger.touch(a)
    ledger.touch(b)
    told = []
    for _ in range(5):
        told.append(ledger.unsaid(600, 3))
        assert ledger._unsaid._keys == sum(len(chain) for _, chain in ledger._unsaid._chains.values())
    assert [len(some) for some in told] == [3, 3, 3, 1, 0]
    for chain in (a, b):
        assert [one for some in told for one in some if one in chain] == chain


def test_the_store_never_shows_a_head_as_older_than_its_tail(clock: Clock) -> None:
    ledger = Ledger(clock)
    head, old, new = key("head"), key("old", depth=1), key("new", depth=1)
    for one in (head, old):
        write(ledger, one)
    clock.time += 120
    ledger.expect(new)
    ledger.touch([head, new])
    assert ledger.unsaid(600, 100) == []
    clock.time += 60
    ledger.admit(new, 1)
    ledger.note(new, EXACT)
    assert ledger.unsaid(600, 100) == [head], "told 180 s ago only, but what is behind it is younger"
    assert ledger.unsaid(600, 100) == []


def test_how_much_is_remembered_to_be_told_is_bounded(clock: Clock) -> None:
    ledger = Ledger(clock)
    for turn in range(2000):
        ledger.touch(chain_of(str(turn), 40))
        ledger.touch(chain_of(str(turn // 2), 40))
    assert 32_000 < ledger._unsaid._keys <= 32_768
    assert ledger._unsaid._keys == sum(len(chain) for _, chain in ledger._unsaid._chains.values())


# -- all of it ---------------------------------------------------------------------------------------------------------


def test_names_by_prefix(clock: Clock) -> None:
    ledger = Ledger(clock)
    keys = [ChunkKey(f"{finger * 32}/{tag}", depth, sha256(f"{finger}{tag}{depth}".encode()).digest())
            for depth in range(11) for tag in ("t", "tt") for finger in "ab"]  # fmt: skip
    for one in keys:
        write(ledger, one)
    random.Random(5).shuffle(keys)
    ledger.touch(keys[::-1])
    a = "a" * 32
    for prefix in ("", a, a[:5], f"{a}/", f"{a}/t", f"{a}/t/", f"{a}/t/1", f"{a}/t/10-", str(keys[3]), "c", f"{a}/t/x"):
        assert ledger.names(prefix) == [one for one in keys if str(one).startswith(prefix)], prefix


class Interleaved(Clock):
    """Whenever a lock is released, something else happens."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] = lambda: None
        self._busy = False

    def lock(self) -> Lock:
        return self

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        if not self._busy:
            self._busy = True
            self.meanwhile()
            self._busy = False


def test_names_in_the_order_they_have_at_the_end() -> None:
    runtime = Interleaved()
    ledger = Ledger(runtime)
    keys = [key(place) for place in range(3500)]
    for one in keys:
        write(ledger, one)
    uses = iter([keys[1500:1510], keys[100:110], keys[3000:3010], keys[2000:2010]])
    runtime.meanwhile = lambda: ledger.touch(next(uses, []))
    names = ledger.names()
    assert names == ledger.names() and set(names) == set(keys)


def test_the_row_of_a_cursor_is_an_ordinary_row_again() -> None:
    rows = Rows()
    links = Links(rows)
    ring = Ring(rows, links)
    ring.close_cursor(ring.open_cursor())
    assert set(rows.state) == {FREE}
    assert Ring(rows, links).oldest() == 0


def test_names_come_to_an_end_however_much_is_used_meanwhile() -> None:
    runtime = Interleaved()
    ledger = Ledger(runtime)
    keys = [key(place) for place in range(3000)]
    for one in keys:
        write(ledger, one)
    chances = iter(range(100))

    def use() -> None:
        assert next(chances, None) is not None, "as if for ever"
        ledger.touch(keys[:1500])

    runtime.meanwhile = use
    assert set(ledger.names()) == set(keys)


def test_names_while_others_use_and_evict(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=5000)
    keys = [key(place) for place in range(4000)]
    for one in keys:
        write(ledger, one)
    stop = threading.Event()

    def use() -> None:
        rng = random.Random(1)
        while not stop.is_set():
            start = rng.randrange(4000)
            ledger.touch(keys[start : start + 500])
            ledger.admit(key("new"), 1000)
            ledger.forget([key("new")])

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            names = ledger.names()
            assert len(names) == len(set(names)) and set(names) >= set(keys)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    ledger.forget([key("new")])
    assert ledger.names() == order_of_going(ledger)


def test_many_threads_leave_the_accounts_right(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=500, quota={"*": 300}, ttl=1000.0, policy="tiny_lfu")
    keys = [key(name, tag=tag) for name in range(400) for tag in ("a", "b")]
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(1500):
                some = rng.sample(keys, 5)
                ledger.touch(some)
                ledger.welcome(some[0], 3)
                if ledger.admit(some[0], rng.randrange(1, 9)) is not None:
                    ledger.note(some[0], EXACT)
                ledger.forget_absent(some[1])
                ledger.expire()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    listing = [entry(one, START - 10, nbytes=2) for one in keys]
    for thread in threads:
        thread.start()
    for _ in range(5):
        ledger.recover(iter(listing))
        ledger.names()
    for thread in threads:
        thread.join()
    assert errors == []
    ledger.admit(key("last", tag="c"), 1)
    rows = ledger._rows
    each = {one: rows.bytes[rows.find[one.digest[0]](one.digest, 0)] for one in ledger.names()}
    assert sum(each.values()) == ledger.bytes <= 500 and len(each) == len(ledger)
    for tag, nbytes in ledger.tenants().items():
        assert nbytes == sum(size for one, size in each.items() if one.namespace.endswith(tag)) <= 300


def test_no_row_is_an_object_for_the_garbage_collector(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=1 << 40, quota={"*": 1 << 40}, ttl=1e6)
    gc.collect()
    before = len(gc.get_objects())
    for place in range(5000):
        write(ledger, key(place))
    gc.collect()
    assert len(gc.get_objects()) - before < 500


def test_rows_are_used_again(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=10, quota={"*": 8}, ttl=60.0)
    for place in range(3000):
        write(ledger, key(place, tag=str(place % 3)))
        ledger.expect(key("pending"))
        ledger.forget_pending(key("pending"))
        clock.time += 1
        ledger.expire()
        ledger.names()
    assert ledger._rows.end < 1200, "rows of blobs, and of slots of time"


@pytest.mark.parametrize("lengths", [Sequence, list, tuple])
def test_keys_come_in_any_sequence(clock: Clock, lengths: type) -> None:
    ledger = Ledger(clock)
    chain: Sequence[ChunkKey] = tuple(chain_of("a", 3)) if lengths is not list else chain_of("a", 3)
    for one in chain:
        write(ledger, one)
    ledger.touch(chain)
    assert ledger.known(chain) == [EXACT] * 3 and ledger.names() == list(reversed(chain))


# -- what is being deleted ---------------------------------------------------------------------------------------------


def test_nothing_is_learnt_of_a_victim_until_it_is_deleted(clock: Clock) -> None:
    ledger = SlowLedger(clock, capacity=3)
    a, b = key("a"), key("b")
    write(ledger, a, 2)
    (victim,) = ledger.admit(b, 2) or []
    assert victim.key == a
    ledger.note(a, EXACT, nbytes=2, since=ledger.mark())
    assert ledger.known([a]) == [None] and ledger.bytes == 2, "a read saw it while it was on its way out"
    assert ledger.admit(a, 1) is None, "it would be deleted as soon as it was written"
    ledger.deleted([victim])
    assert ledger.admit(a, 1) == []
    ledger.note(a, EXACT, nbytes=1)
    assert ledger.known([a]) == [EXACT] and ledger.bytes == 3


def test_a_read_that_began_before_a_victim_was_deleted_learns_nothing(clock: Clock) -> None:
    ledger = SlowLedger(clock, capacity=3)
    write(ledger, key("a"), 2)
    victims = ledger.admit(key("b"), 2) or []
    since = ledger.mark()  # of a read that finds the blob, and takes its time
    ledger.deleted(victims)
    ledger.note(key("a"), EXACT, nbytes=2, since=since)
    assert ledger.known([key("a")]) == [None] and ledger.bytes == 2


@pytest.mark.parametrize("between", [0, 5000])
def test_a_read_that_began_before_a_blob_was_forgotten_learns_nothing_however_long_it_takes(
    clock: Clock, between: int
) -> None:
    ledger, one = Ledger(clock), key("one")
    write(ledger, one)
    mark = ledger.mark()
    ledger.forget([one])
    for number in range(between):
        ledger.forget([key(number)])
    ledger.note(one, EXACT, nbytes=1, since=mark)
    assert ledger.known([one]) == [None] and ledger.bytes == 0
    ledger.note(one, EXACT, nbytes=1, since=ledger.mark())
    assert ledger.known([one]) == [EXACT]


def test_what_is_there_is_learnt_of_though_it_was_forgotten_before(clock: Clock) -> None:
    ledger, one = Ledger(clock), key("one")
    mark = ledger.mark()
    ledger.forget([one])
    write(ledger, one)
    ledger.note(one, Fidelity.LOSSY, since=mark)
    assert ledger.known([one]) == [Fidelity.LOSSY]


def test_a_victim_that_could_not_be_deleted_counts_again(clock: Clock) -> None:
    ledger = SlowLedger(clock, capacity=3)
    write(ledger, key("a"), 2)
    victims = ledger.admit(key("b"), 2) or []
    ledger.kept(victims)
    assert ledger.known([key("a")]) == [Fidelity.UNKNOWN] and ledger.bytes == 4
