"""Chunks come in the time of the tier that has them: slower tiers are not asked, whatever state they are in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from core_support import CHUNK
from faults_support import KV, MEMORY, TOKENS, Open
from simulation.content import CHUNK_TOKENS
from simulation.levels import DEADLINE_SECONDS, EARLY_SECONDS, PROMPT, SLOW_SECONDS, VERBS, Levels

from kvloom.pipeline.locate import Search
from kvloom.tiers.request_context import HURRIED_SHARE

READS = [verb for verb in VERBS if verb not in ("store", "wait", "load some")]
"""The last one asks as `retrieve_layer` does: a few stacks are enough for it."""
HURRIED = ("retrieve_layer", "load_layers", "lookup", "find")
"""They answer as soon as a tier that is asked for the rest has had its share of the deadline."""
TYPES = ("sim", "sim_shared")
"""The first store's listing is trusted; the second is asked."""


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
@pytest.mark.parametrize("verb", READS[:-1])
def test_slower_tiers_of_all_stacks_are_not_asked_for_what_a_faster_one_has(verb: str, hurt: str) -> None:
    for stack in _all():
        _check_not_asked(verb, *stack, hurt=hurt)


def _check_prefix(verb: str, types: tuple[str, ...], memory: bool, holder: int) -> None:
    """Half of the chunks are in one tier; those below it are frozen, and asked for the rest."""
    half = PROMPT.chunks // 2 * CHUNK_TOKENS
    below = range(holder + 1, len(types))
    found = Levels(types, memory=memory).run(
        verb, holder=holder, chunks=PROMPT.chunks // 2, hurt=dict.fromkeys(below, "frozen")
    )
    about = f"{types} memory={memory} holder={holder}: {found}"
    assert found.tokens == half, about
    assert found.charged <= {f"s{number}" for number in below}, about
    if verb in HURRIED:
        assert found.seconds <= len(below) * HURRIED_SHARE * DEADLINE_SECONDS + EARLY_SECONDS, about
    else:
        assert found.seconds <= DEADLINE_SECONDS + EARLY_SECONDS, about
    if verb in ("retrieve", "load"):
        assert found.early == half, about


@pytest.mark.parametrize("verb", [verb for verb in READS if verb != "pin"])
def test_a_prefix_comes_in_the_time_of_its_tier_while_a_slower_one_is_asked_for_the_rest(verb: str) -> None:
    for memory, holder in ((True, -1), (True, 0), (False, 0)):
        _check_prefix(verb, ("sim", "sim_shared", "sim_shared"), memory, holder)


@pytest.mark.slow
@pytest.mark.parametrize("verb", [verb for verb in READS[:-1] if verb != "pin"])
def test_a_prefix_comes_in_the_time_of_its_tier_in_all_stacks(verb: str) -> None:
    for types, memory, holder, everywhere in _all():
        if not everywhere:
            _check_prefix(verb, types, memory, holder)


@pytest.mark.parametrize("verb", ["load some", "prefetch"])
@pytest.mark.parametrize("without", [0, 2, PROMPT.chunks - 1])
def test_a_frozen_tier_that_is_asked_for_one_chunk_takes_no_other(verb: str, without: int) -> None:
    """Those behind it are read meanwhile, however long their tier takes."""
    levels = Levels(("sim_shared", "sim_shared"), memory=True)
    found = levels.run(verb, holder=0, chunks=PROMPT.chunks, hurt={0: "slow", 1: "frozen"}, without=without)
    assert (found.tokens, found.charged) == (PROMPT.length - CHUNK_TOKENS, {"s1"}), found


def test_a_chunk_that_a_tier_was_asked_for_longer_comes_in_a_run_of_its_own(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of one call of a connector are in order."""
    engine = open_engine(MEMORY)
    engine.store(TOKENS, kv=KV)
    segments = engine.segments(TOKENS)
    answers = iter([False, False])

    def knows(search: Search, key: object) -> bool:
        return key != segments[1].key or next(answers, True)

    monkeypatch.setattr(Search, "knows", knows)
    stack = engine._stack
    runs = stack.loader.fetch(segments, engine.connector.shape, stack.context(), gaps=True)
    assert [[segment.start // CHUNK for segment, _ in run] for run in runs] == [[0, 2, 3], [1]]


@pytest.mark.parametrize("verb", ["retrieve", "load", "retrieve_layer"])
def test_what_a_slower_tier_has_comes_after_it(verb: str) -> None:
    """The rest is in the slower tier: all of it comes, in the time that tier takes."""
    levels = Levels(("sim_shared", "sim_shared"), memory=True)
    found = levels.run(verb, holder=1, chunks=PROMPT.chunks, hurt={1: "slow"})
    assert (found.tokens, found.charged) == (PROMPT.length, frozenset()), found


@pytest.mark.parametrize("verb", ["retrieve", "load", "retrieve_layer", "load_layers"])
def test_all_comes_from_a_tier_that_needs_more_than_a_deadline_for_all(verb: str) -> None:
    levels = Levels(("sim_shared", "sim_shared"), memory=True)
    found = levels.run(verb, holder=1, chunks=PROMPT.chunks, hurt={1: "sluggish"})
    assert found.seconds > DEADLINE_SECONDS, found
    assert (found.tokens, found.charged) == (PROMPT.length, frozenset()), found


def test_what_has_come_whole_within_the_deadline_is_in_the_mask_of_every_layer() -> None:
    levels = Levels(("sim_shared", "sim_shared"), memory=True)
    found = levels.run("wait", holder=1, chunks=PROMPT.chunks, hurt={1: "sluggish"})
    assert 0 < found.tokens < PROMPT.length, found


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize("had", [0, PROMPT.chunks], ids=["new", "there already"])
def test_a_store_takes_the_time_of_the_healthy_tiers(memory: bool, silent: int, had: int) -> None:
    levels = Levels(("sim_shared", "sim_shared"), memory=memory)
    found = levels.run("store", holder=1 - silent, chunks=had, hurt={silent: "frozen"})
    # Without memory it depends on the silent tier alone whether what the other has is copied once more.
    most = HURRIED_SHARE * DEADLINE_SECONDS if had and not memory else 0.0
    assert found.seconds < most + EARLY_SECONDS and not found.charged, found
