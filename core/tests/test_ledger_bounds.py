"""The ledger's bounds: the quotas of tenants, the time to live, and who is let in by how often it is used."""

from __future__ import annotations

import random
from collections.abc import Iterator
from hashlib import sha256

import pytest
from core_support import PromptLedger as Ledger
from ledger_support import EXACT, START, Clock, entry, key, write

from kvloom import ChunkKey
from kvloom.tiers.index.ledger import Fidelity, Victim


@pytest.fixture
def clock() -> Clock:
    return Clock()


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
