"""The ledger and the store: what a listing brings back, and what the store is told to show in the next."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from core_support import PromptLedger as Ledger
from hypothesis import given
from hypothesis import strategies as st
from ledger_support import EXACT, START, Clock, chain_of, entry, held, key, order_of_going, write

from kvloom import ChunkKey, Entry
from kvloom.tiers.index.ledger import Fidelity, Victim

NAMESPACE = f"{'f' * 32}/-"


@pytest.fixture
def clock() -> Clock:
    return Clock()


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


def test_a_size_that_no_blob_has_ends_no_listing(clock: Clock) -> None:
    ledger = Ledger(clock, capacity=100)
    listed = [entry(key("a"), START - 9, nbytes=10**30), entry(key("b"), START, nbytes=7)]
    assert [victim.key for victim in ledger.recover(listed)] == [key("a")]
    assert ledger.complete and ledger.names() == [key("b")] and ledger.bytes == 7


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


def test_what_is_deleted_after_it_was_listed_and_before_it_is_taken_in(clock: Clock) -> None:
    ledger = Ledger(clock)

    def listing() -> Iterator[Entry]:
        yield from (entry(key(name), START - 5) for name in ("deleted", "not there", "there"))
        ledger.forget([key("deleted")])
        ledger.forget_absent(key("not there"), since=ledger.mark())

    assert ledger.recover(listing()) == [] and held(ledger) == {key("there")}


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
        assert ledger._access_times._keys == sum(len(chain) for _, chain in ledger._access_times._chains.values())
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
    assert 32_000 < ledger._access_times._keys <= 32_768
    assert ledger._access_times._keys == sum(len(chain) for _, chain in ledger._access_times._chains.values())
