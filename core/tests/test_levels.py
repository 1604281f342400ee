"""Chunks come in the time of the tier that has them: slower tiers are not asked, whatever state they are in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from simulation.content import CHUNK_TOKENS
from simulation.levels import DEADLINE_SECONDS, EARLY_SECONDS, PROMPT, SLOW_SECONDS, VERBS, Levels

READS = [verb for verb in VERBS if verb != "store"]
TYPES = ("sim", "sim_shared")
KNOWN = "sim"
"""The listing of such a tier says what it holds; one of the other type is asked."""


def _few() -> Iterator[tuple[tuple[str, ...], bool, int, bool]]:
    """Types of stored tiers, whether there is memory above, the tier that has the chunks (-1: memory), and whether
    those below it have them too."""
    yield ("sim_shared",), True, -1, True
    yield ("sim", "sim_shared"), True, 0, False
    yield ("sim_shared", "sim_shared"), False, 0, True
    yield ("sim_shared", "sim_shared", "sim"), True, 1, False


def _all() -> Iterator[tuple[tuple[str, ...], bool, int, bool]]:
    for count in (1, 2, 3):
        for types, memory in itertools.product(itertools.product(TYPES, repeat=count), (True, False)):
            for holder, everywhere in itertools.product(range(-1 if memory else 0, count - 1), (False, True)):
                yield types, memory, holder, everywhere


def _check_not_asked(verb: str, types: tuple[str, ...], memory: bool, holder: int, everywhere: bool, hurt: str) -> None:
    below = range(holder + 1, len(types))
    if verb == "pin" and not memory:
        return
    found = Levels(types, memory=memory).run(
        verb, holder=holder, chunks=PROMPT.chunks, everywhere=everywhere, hurt=dict.fromkeys(below, hurt)
    )  # fmt: skip
    about = f"{types} memory={memory} holder={holder} everywhere={everywhere}: {found}"
    assert found.tokens == PROMPT.length, about
    assert found.seconds < EARLY_SECONDS < SLOW_SECONDS, about
    assert not found.asked & {f"s{number}" for number in below}, about
    assert not found.charged, about


@pytest.mark.parametrize("verb", READS)
def test_slower_tiers_are_not_asked_for_what_a_faster_one_has(verb: str) -> None:
    for number, stack in enumerate(_few()):
        _check_not_asked(verb, *stack, hurt=("frozen", "slow")[number % 2])


@pytest.mark.slow
@pytest.mark.parametrize("hurt", ["frozen", "slow"])
@pytest.mark.parametrize("verb", READS)
def test_slower_tiers_of_all_stacks_are_not_asked_for_what_a_faster_one_has(verb: str, hurt: str) -> None:
    for stack in _all():
        _check_not_asked(verb, *stack, hurt=hurt)


@pytest.mark.parametrize("verb", [verb for verb in READS if verb != "pin"])
def test_a_prefix_comes_in_the_time_of_its_tier_while_a_slower_one_is_asked_for_the_rest(verb: str) -> None:
    half = PROMPT.chunks // 2
    for memory, holder in ((True, -1), (True, 0), (False, 0)):
        levels = Levels(("sim", "sim_shared", "sim_shared"), memory=memory)
        found = levels.run(verb, holder=holder, chunks=half, hurt={1: "frozen"})
        about = f"memory={memory} holder={holder}: {found}"
        assert found.tokens == half * CHUNK_TOKENS, about
        assert found.seconds <= DEADLINE_SECONDS + EARLY_SECONDS, about
        assert found.charged <= {"s1"}, about
        if verb in ("retrieve", "load"):
            assert found.early == half * CHUNK_TOKENS, about


@pytest.mark.parametrize("verb", ["retrieve", "load", "retrieve_layer"])
def test_what_a_slower_tier_has_comes_after_it(verb: str) -> None:
    """The rest is in the slower tier: all of it comes, in the time that tier takes."""
    levels = Levels(("sim_shared", "sim_shared"), memory=True)
    found = levels.run(verb, holder=1, chunks=PROMPT.chunks, hurt={1: "slow"})
    assert (found.tokens, found.charged) == (PROMPT.length, frozenset()), found
