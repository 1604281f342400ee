"""The tree against a model that compares every sequence with every other one."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from random import Random

import pytest
import radix_support
from hypothesis import given, settings
from hypothesis import strategies as st
from radix_support import Model, packed

import kvloom_tokens_radix
from kvloom_tokens_radix.cutting import Rules
from kvloom_tokens_radix.tree import Tree

RULES = st.sampled_from(
    [Rules(8, 2), Rules(8, 1), Rules(8, 3, 2), Rules(16, 4), Rules(16, 5, 3), Rules(4, 16), Rules(1)]
)

FILES = [str(Path(kvloom_tokens_radix.__file__).parent / "*.py"), radix_support.__file__]
"""Files that allocate a tree's content; other threads of the process allocate too."""


@st.composite
def branching(draw: st.DrawFn, most: int = 12) -> list[tuple[int, ...]]:
    """Sequences many of which begin like an earlier one; a few tokens only, so that some do by chance."""
    found: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, most))):
        base = draw(st.sampled_from(found)) if found and draw(st.booleans()) else ()
        kept = base[: draw(st.integers(0, len(base)))]
        found.append((*kept, *draw(st.lists(st.integers(-1, 2), max_size=40))))
    return found


@settings(deadline=None, max_examples=120)
@given(rules=RULES, learnt=branching(), asked=branching(4))
def test_the_tree_cuts_as_the_model_does(
    rules: Rules, learnt: list[tuple[int, ...]], asked: list[tuple[int, ...]]
) -> None:
    tree, model = Tree(rules, 1 << 20), Model(rules)
    for tokens in learnt:
        assert tree.cut("", packed(tokens)) == model.cut(tokens)
        tree.learn("", packed(tokens))
        model.learn(tokens)
        for other in (*learnt, *asked):
            assert tree.cut("", packed(other)) == model.cut(other)


@settings(deadline=None, max_examples=80)
@given(rules=RULES, learnt=branching(20))
def test_what_was_stored_stays_cut_as_it_was(rules: Rules, learnt: list[tuple[int, ...]]) -> None:
    tree = Tree(rules, 1 << 20)
    stored: dict[tuple[int, ...], list[int]] = {}
    for tokens in learnt:
        stored.setdefault(tokens, tree.cut("", packed(tokens)))
        tree.learn("", packed(tokens))
        for earlier, its_ends in stored.items():
            assert tree.cut("", packed(earlier)) == its_ends


@settings(deadline=None, max_examples=80)
@given(rules=RULES, learnt=branching(20), asked=branching(4), memory=st.sampled_from([4_000, 8_000, 1 << 20]))
def test_segments_are_whole_neither_short_nor_long(
    rules: Rules, learnt: list[tuple[int, ...]], asked: list[tuple[int, ...]], memory: int
) -> None:
    tree = Tree(rules, memory)
    step, least, align = rules
    for tokens in learnt:
        tree.learn("", packed(tokens))
        assert tree.nbytes <= memory
        assert tree.nbytes == sum(node.nbytes for node in tree.nodes())
        for other in (tokens, *asked):
            cut = tree.cut("", packed(other))
            assert cut == sorted(set(cut)) and (not cut or cut[-1] <= len(other))
            for start, end in zip([0, *cut], cut, strict=False):
                assert min(least, step) <= end - start <= step or align > 1
                assert end % step == 0 or end % align == 0
                assert start // step == (end - 1) // step, "no segment reaches over a chunk's end"
            assert set(range(step, len(other) + 1, step)) <= set(cut)


def test_nobody_sees_what_another_salt_learnt() -> None:
    tree = Tree(Rules(256), 1 << 20)
    tokens = tuple(range(300))
    branch = (*tokens[:100], *([7] * 200))
    tree.learn("a", packed(tokens))
    assert tree.cut("a", packed(branch)) == [100, 256, 300]
    assert tree.cut("b", packed(branch)) == [256, 300]


def test_what_was_not_used_for_longest_goes_first_and_leaves_before_what_they_hang_on() -> None:
    tree = Tree(Rules(64), 20_000)
    shared = tuple(range(1000, 1040))

    def is_known(number: int) -> bool:
        return 90 in tree.cut("", packed((*shared, *([number] * 50), *([-2] * 40))))

    for number in range(200):
        tree.learn("", packed((*shared, *([number] * 90))))
        tree.learn("", packed((*shared, *([0] * 90))))
        assert tree.cut("", packed((*shared, *([-1] * 90))))[0] == 40, "what they share is used most"
        assert is_known(0) and is_known(number)
    assert 4 < sum(map(is_known, range(200))) < 20
    assert all(map(is_known, range(196, 200)))


def test_a_sequence_longer_than_the_memory_is_known_from_its_start() -> None:
    tree = Tree(Rules(256), 64 << 10)
    tokens = tuple(Random(1).choices(range(50_000), k=100_000))
    tree.learn("", packed(tokens))
    assert 0 < tree.nbytes <= 64 << 10
    branch = (*tokens[:1000], *([1] * 1000))
    assert 1000 in tree.cut("", packed(branch))


@pytest.mark.parametrize("kind", ["many short", "few long", "many salts", "growing"])
def test_memory_stays_within_bounds(kind: str) -> None:
    memory, chance = 512 << 10, Random(3)
    tree = Tree(Rules(256), memory)
    tracemalloc.start()
    try:
        talk: tuple[int, ...] = ()
        for number in range(750 if kind != "few long" else 15):
            if kind == "growing":
                talk = () if number % 40 == 0 else talk
                talk = (*talk, *chance.choices(range(50_000), k=60))
                tree.learn("", packed(talk))
            else:
                count = {"many short": 40, "few long": 30_000, "many salts": 20}[kind]
                salt = str(number) if kind == "many salts" else ""
                tree.learn(salt, packed(tuple(chance.choices(range(50_000), k=count))))
        taken = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, file) for file in FILES])
    finally:
        tracemalloc.stop()
    assert tree.nbytes > memory // 2, "the test fills it"
    assert sum(one.size for one in taken.traces) <= memory
