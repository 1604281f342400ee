"""The ledger: what is held, how much it is, who goes first, and what is known of what is being deleted."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
from core_support import PromptLedger as Ledger
from hypothesis import given
from hypothesis import strategies as st
from ledger_support import EXACT, Clock, chain_of, held, key, order_of_going, write

from kvloom import ChunkKey
from kvloom.tiers.chain import Chain
from kvloom.tiers.index.ledger import Fidelity, Victim
from kvloom.tiers.index.ledger import Ledger as SlowLedger


@pytest.fixture
def clock() -> Clock:
    return Clock()


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
    ledger.forget_absent(a, since=ledger.mark())
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
        ledger.forget_absent(one, since=ledger.mark())
    for one in (admitted, there, key("unknown")):
        ledger.forget_pending(one)
    assert held(ledger) == {pending, admitted, there} and ledger.bytes == 12 and len(ledger) == 2
    ledger.forget_pending(pending)
    ledger.forget_absent(there, since=ledger.mark())
    ledger.forget_absent(key("unknown"), since=ledger.mark())
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


@pytest.mark.parametrize(("bounds", "reason"), [({"capacity": 3}, "capacity"), ({"quota": {"*": 3}}, "quota")])
def test_what_is_admitted_first_leaves_room_for_what_is_before_it(
    clock: Clock, bounds: dict[str, Any], reason: str
) -> None:
    """Two threads write a chain, and the one with the chunk before is the later one."""
    ledger = Ledger(clock, **bounds)
    write(ledger, key("old"))
    keys = chain_of("a", 4)
    chain = Chain(keys)
    for one in keys:
        ledger.expect(one, chain)
    for one in keys[1:3]:
        assert ledger.admit(one, 1, chain) == [], "there is room for it"
    assert ledger.admit(keys[3], 1, chain) is None, "there is none for the first as well"
    assert ledger.admit(keys[0], 1, chain) == [Victim(key("old"), 1, reason)]
    for one in keys[:3]:
        ledger.note(one, EXACT)
        assert ledger.excess(one, chain) == []
    assert [known is EXACT for known in ledger.known(keys)] == [True, True, True, False]


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
    other = chain_of("a", 2, tag="other")
    assert Chain([a[0], *other]).previous(other[1]) == other[0]
    assert Chain([a[0], a[2]]).previous(other[1]) is None
    starts = [one._replace(depth=100 * one.depth) for one in a]  # depths that do not count chunks
    assert [Chain(starts).previous(one) for one in starts] == [None, *starts[:3]]
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


@pytest.mark.parametrize("between", [0, 5000])
def test_a_look_that_began_before_a_blob_was_written_does_not_say_that_it_is_absent(clock: Clock, between: int) -> None:
    ledger, one = Ledger(clock), key("one")
    mark = ledger.mark()
    write(ledger, one)
    for number in range(between):
        write(ledger, key(number))
    ledger.forget_absent(one, since=mark)
    assert ledger.known([one]) == [EXACT]
    ledger.forget_absent(one, since=ledger.mark())
    assert ledger.known([one]) == [None]


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


# -- rows and keys -----------------------------------------------------------------------------------------------------


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
