"""A tier's answers from its ledger: chunks that this engine can use, and chunks that need not be written again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from core_support import CHUNK, Serving, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom import chain
from kvloom.builtin.dict_backend import DictBackend
from kvloom.runtime import SystemRuntime
from kvloom.tiers.index.existence_cache import ExistenceCache
from kvloom.tiers.index.ledger import Fidelity, Ledger
from kvloom.tiers.stored.calls import Calls
from kvloom.tiers.stored.existence import Existence
from kvloom.types import ChunkKey

KEYS: dict[Fidelity | None, ChunkKey] = {
    fidelity: segment.key
    for fidelity, segment in zip(
        (None, Fidelity.EXACT, Fidelity.LOSSY, Fidelity.UNKNOWN, Fidelity.UNREADABLE, Fidelity.LATER),
        chain(tokens_of(6 * CHUNK), chunk_tokens=CHUNK, fingerprint="f" * 32),
        strict=True,
    )
}


def existence(*, lossless: bool, exact_only: bool) -> Existence:
    """Over a ledger that knows one blob of each kind, and is complete."""
    ledger = Ledger(SystemRuntime())
    ledger.complete = True
    for fidelity, key in KEYS.items():
        if fidelity is not None:
            ledger.note(key, fidelity, nbytes=4096)
    return Existence(
        DictBackend(DictBackend.Config()), ledger, cast(Calls, Serving()), lossless=lossless, exact_only=exact_only,
        expired=lambda header: False, ttl=False,
    )  # fmt: skip


def which(answers: list[bool]) -> set[Fidelity | None]:
    return {fidelity for fidelity, yes in zip(KEYS, answers, strict=True) if yes}


@pytest.mark.parametrize("lossless", [True, False])
@pytest.mark.parametrize("exact_only", [True, False])
def test_what_can_be_used(lossless: bool, exact_only: bool) -> None:
    context = cast(Any, None)
    found = which(existence(lossless=lossless, exact_only=exact_only).find(list(KEYS.values()), context))
    assert found == {Fidelity.EXACT, Fidelity.UNKNOWN} | (set() if exact_only else {Fidelity.LOSSY})


def test_what_need_not_be_written() -> None:
    """A lossless tier improves on what is lossy, or not known; nobody writes over what a later release wrote."""

    def enough(*, lossless: bool, exact_only: bool) -> set[Fidelity | None]:
        return which(existence(lossless=lossless, exact_only=exact_only).known_enough(list(KEYS.values())))

    for exact_only in (True, False):
        assert enough(lossless=True, exact_only=exact_only) == {Fidelity.EXACT, Fidelity.LATER}
    some = {Fidelity.EXACT, Fidelity.UNKNOWN, Fidelity.LATER}
    assert enough(lossless=False, exact_only=True) == some
    assert enough(lossless=False, exact_only=False) == some | {Fidelity.LOSSY}


class Distant(DictBackend):
    """A store that is a request away for each key."""

    shared = True
    one_by_one = True
    threads = 4

    def __init__(self, there: set[str]) -> None:
        super().__init__(DictBackend.Config())
        self.there = there
        self.asked: list[int] = []

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        self.asked.append(len(keys))
        return [key in self.there for key in keys]


def found_far_away(keys: Sequence[ChunkKey], there: set[ChunkKey]) -> tuple[list[bool], list[int]]:
    """The keys found, and the number of keys in each question."""
    backend = Distant({str(key) for key in there})
    calls = cast(Calls, Serving())
    one = Existence(
        backend,
        Ledger(SystemRuntime()),
        calls,
        lossless=True,
        exact_only=False,
        expired=lambda header: False,
        ttl=False,
    )
    return one.find(keys, cast(Any, None)), backend.asked


@given(st.integers(1, 700), st.data())
@settings(deadline=None)
def test_the_end_of_a_chain_is_found_in_few_requests(length: int, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, length))
    keys = [ChunkKey("f/-", 3 * depth, depth.to_bytes(32, "big")) for depth in range(length)]
    found, asked = found_far_away(keys, set(keys[:end]))
    assert found == [place < end for place in range(length)]
    assert max(asked) <= 5 and len(asked) <= 6 and (end < length or len(asked) == 1) and (end or len(asked) == 1)


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 5))
def test_with_gaps_nothing_is_missed_before_the_first_of_them(there: list[bool], chains: int) -> None:
    keys = [ChunkKey("f/-", depth % (60 // chains), depth.to_bytes(32, "big")) for depth in range(len(there))]
    found, _ = found_far_away(keys, {key for key, here in zip(keys, there, strict=True) if here})
    chain_is_whole = True
    for key, here, said in zip(keys, there, found, strict=True):
        chain_is_whole = (here and chain_is_whole) if key.depth else here
        assert said or not chain_is_whole
        assert here or not said or not chain_is_whole


def test_what_is_in_no_chain_is_asked_about_one_by_one() -> None:
    keys = [ChunkKey("f/-", 0, number.to_bytes(32, "big")) for number in range(6)]
    found, asked = found_far_away(keys, set(keys[::2]))
    assert found == [True, False] * 3 and sum(asked) == 6


def test_answers_are_taken_for_granted_for_as_long_as_it_is_said() -> None:
    clock = [0.0]
    keys = [ChunkKey("f/-", depth, depth.to_bytes(32, "big")) for depth in range(3)]
    backend = Distant({str(keys[0])})
    one = Existence(
        backend, Ledger(SystemRuntime()), cast(Calls, Serving()), lossless=True, exact_only=False,
        expired=lambda header: False, ttl=False, remembered=ExistenceCache(2.0, lambda: clock[0]),
    )  # fmt: skip
    assert one.find(keys[:2], cast(Any, None)) == [True, False]
    requests = len(backend.asked)
    backend.there = {str(key) for key in keys}
    clock[0] = 1.9
    assert one.find(keys[:2], cast(Any, None)) == [True, False] and len(backend.asked) == requests
    assert one.find(keys, cast(Any, None)) == [True, False, True], "only what is new is asked about"
    clock[0] = 2.0
    assert one.find(keys, cast(Any, None)) == [True, True, True]
