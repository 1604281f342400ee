"""Pieces of fixed length, found at any offset by a rolling hash and verified by the strong one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from blend_models import NONE, config, model, text
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom import Engine
from kvloom_blend.retrievers import FixedRetriever
from kvloom_blend.retrievers.rolling import RollingHash
from kvloom_connector_transformers import spec_of

FIXED = {"type": "fixed", "piece_tokens": 16, "prefix": False}


@pytest.fixture(scope="module")
def engine() -> Any:
    plan = config(NONE, FIXED)
    with Engine.open(plan, spec_of(model())) as engine:
        yield engine


@settings(max_examples=60, deadline=None)
@given(offset=st.integers(0, 60), begin=st.integers(0, 40), length=st.integers(32, 60), seed=st.integers(0, 5))
def test_runs_of_two_pieces_are_found_at_every_offset(
    engine: Any, offset: int, begin: int, length: int, seed: int
) -> None:
    """At least half of a run of known text is found, wherever it was cut and placed, and each token gets its own KV."""
    known = text(seed, 100)
    runner = _runner()
    retriever = engine.blending.retriever
    (cache,) = runner.prefill([known]).caches
    engine.save(retriever.in_context(known), cache=cache).result()
    retriever.learn(known)
    run = known[begin : begin + length]
    prompt = torch.cat([text(77, offset), run, text(78, 9)])
    found = retriever.new_request(prompt, torch.tensor([0, len(prompt)])).result(1)
    mask, stood = found.valid_mask, found.original_positions
    inside = mask[offset : offset + len(run)]
    assert inside.sum() >= 16 * max(1, (len(run) - 15) // 16)
    assert mask.sum() == inside.sum()
    assert torch.equal(known[stood[mask]], prompt[mask])
    truth = cache.layers[1].keys[0].transpose(0, 1).flatten(1)
    assert torch.equal(found.k[mask], truth[stood[mask]])


_RUNNERS: list[Any] = []


def _runner() -> Any:
    from kvloom_blend import Runner

    if not _RUNNERS:
        _RUNNERS.append(Runner(model(), spec_of(model())))
    return _RUNNERS[0]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=60), st.integers(1, 20))
def test_rolling_hashes_are_those_of_the_windows(tokens: list[int], width: int) -> None:
    import numpy as np

    rolling = RollingHash(width, bases=(1_000_003, 998_244_353 // 7))
    got = rolling.windows(np.array(tokens, dtype=np.int32)).tolist()
    alone = RollingHash(width, bases=(1_000_003, 998_244_353 // 7))
    windows = [tokens[at : at + width] for at in range(len(tokens) - width + 1)]
    assert got == [alone.windows(np.array(one, dtype=np.int32)).item() for one in windows]


def test_collisions_are_no_matches(engine: Any) -> None:
    """With base 1 a window's hash is the sum of its tokens: any order of a known piece looks known."""
    plan = config(NONE, FIXED)
    with Engine.open(plan, spec_of(model())) as engine:
        assert engine.blending is not None
        retriever = engine.blending.retriever
        assert isinstance(retriever, FixedRetriever)
        retriever._rolling = RollingHash(16, bases=(1, 1))
        known = text(3, 32)
        (cache,) = _runner().prefill([known]).caches
        engine.save(retriever.in_context(known), cache=cache).result()
        retriever.learn(known)
        shuffled = torch.cat([known[:16].flip(0), known[16:].flip(0)])
        assert retriever.candidates(shuffled, 0, ""), "the hashes were to collide"
        assert not retriever.new_request(shuffled, torch.tensor([0, 32])).result(0).valid_mask.any()
        prompt = torch.cat([known[:16].flip(0), known])
        mask = retriever.new_request(prompt, torch.tensor([0, 48])).result(0).valid_mask
        assert mask[16:].all() and not mask[:16].any()


def test_of_a_clients_salt_its_tag_is_remembered() -> None:
    """It may be of any length, and stands beside each piece."""
    with Engine.open(config(NONE, FIXED), spec_of(model())) as own:
        retriever: Any = own.blending and own.blending.retriever
        long = "x" * 1_000_000
        retriever.learn(text(1, 64), salt=long)
        assert retriever._known and all(len(name) < 100 for name, _ in retriever._known)
        assert retriever.candidates(text(1, 64), 0, long) and not retriever.candidates(text(1, 64), 0, "y")


def test_a_text_that_repeats_itself_is_not_asked_about_at_every_token(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known piece begins at each of its tokens: to hash them all took 12 s for 131,072 of them."""
    retriever, prompt = engine.blending.retriever, torch.full((2048,), 7)
    retriever.learn(prompt)
    assert len(retriever.candidates(prompt, 0, None)) == 2048 - 15
    asked: list[Any] = []
    monkeypatch.setattr(engine, "find", lambda some: asked.extend(some) or torch.zeros(len(some), dtype=torch.bool))
    assert not retriever.stored(prompt)[1]
    assert 0 < len(asked) <= 8 * 2048 // 16


def test_pieces_that_overlap_one_that_is_gone_are_found(engine: Any) -> None:
    retriever, known = engine.blending.retriever, text(9, 69)
    retriever.learn(known)  # and never kept
    (cache,) = _runner().prefill([known[5:]]).caches
    engine.save(retriever.in_context(known[5:]), cache=cache).result()
    retriever.learn(known[5:])
    _, found = retriever.stored(known)
    assert [(one.start, one.end) for one in found] == [(at, at + 16) for at in range(5, 69, 16)]
