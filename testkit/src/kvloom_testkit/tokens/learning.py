"""Further requirements of token databases that learn."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom import ChunkKey, Segment
from kvloom_testkit.requirements import needs
from kvloom_testkit.tokens.examples import few


class LearningRequirements:
    """Mixed into `TokensConformance`, which has the fixture."""

    @needs("learn")
    def test_T14_what_was_learnt_never_makes_a_key_ambiguous(self, database: Callable[..., Any]) -> None:
        """Whatever instances have learnt, equal keys mean the same tokens up to the same end, and the same start.

        Why: processes learn different sequences and share a store. They may miss each other's chunks, but must never
        read wrong ones.

        Usually: the key names a node of a tree that differs between instances, or leaves out where the segment starts.
        """
        meaning: dict[ChunkKey, tuple[int, tuple[int, ...]]] = {}

        def check_keys(found: list[Segment], tokens: list[int]) -> None:
            for segment in found:
                here = (segment.start, tuple(tokens[: segment.end]))
                assert meaning.setdefault(segment.key, here) == here, f"{segment} is also the key of other tokens"

        @few(12)
        @given(seed=st.integers(0, 10**6))
        def check(seed: int) -> None:
            chance = random.Random(seed)
            instances = [database(), database()]
            prompts = _branching(chance, count=10)
            for tokens in prompts:
                for one in instances:
                    if chance.random() < 0.6:
                        one.learn(torch.tensor(tokens))
                for one in instances:
                    for asked in (tokens, chance.choice(prompts)):
                        check_keys(one.segments(torch.tensor(asked)), asked)
            for one in instances:
                one.close()

        check()

    @needs("learn")
    def test_T15_what_is_learnt_is_found_again(self, database: Callable[..., Any]) -> None:
        """Learning a sequence, once or again, changes neither its own segments nor its tokens.

        Why: it is learnt right after its segments were stored. If it were cut differently afterwards, they would not be
        found.

        Usually: a branch is only detected when the sequence is added, not when it is looked up.
        """
        chance = random.Random(7)
        one = database()
        for tokens in map(torch.tensor, _branching(chance, count=12)):
            stored, copy = one.segments(tokens), tokens.clone()
            for _ in range(2):
                one.learn(tokens)
                assert one.segments(tokens) == stored
            assert torch.equal(tokens, copy)

    @needs("learn")
    def test_T19_tenants_learn_nothing_from_each_other(self, database: Callable[..., Any]) -> None:
        """Sequences learnt with one salt do not change the cuts of sequences with another salt.

        Why: the salt keeps tenants apart. From the cuts and hits of its own prompts, a tenant could otherwise tell what
        others have asked.

        Usually: one tree for all, because the keys differ anyway.
        """
        chance = random.Random(11)
        one, untaught = database(), database()
        prompts = [torch.tensor(tokens) for tokens in _branching(chance, count=8)]
        for tokens in prompts:
            one.learn(tokens, salt="tenant-1")
            one.learn(tokens)
        for tokens in prompts:
            assert one.segments(tokens, salt="tenant-2") == untaught.segments(tokens, salt="tenant-2")


def _branching(chance: random.Random, *, count: int) -> list[list[int]]:
    """Sequences that each begin like another one, branching anywhere."""
    prompts = [chance.choices(range(1000), k=96)]
    while len(prompts) < count:
        other = chance.choice(prompts)
        shared = chance.randrange(len(other))
        prompts.append(other[:shared] + chance.choices(range(1000), k=chance.randrange(1, 90)))
    return prompts
