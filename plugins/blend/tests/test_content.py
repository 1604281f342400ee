"""Pieces that end where their tokens say: the same wherever a text stands, whoever cuts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from blend_models import NONE, config, model, text
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom import Engine
from kvloom_blend import Runner
from kvloom_blend.retrievers import ContentRetriever
from kvloom_connector_transformers import spec_of

CONTENT = {"type": "content", "piece_tokens": 16, "prefix": False}
GOLDEN = [(0, 36), (36, 72), (72, 106), (106, 154), (154, 164), (164, 177), (177, 222)]
tokens_of = st.lists(st.integers(0, 2**31 - 1), max_size=400).map(lambda some: torch.tensor(some, dtype=torch.int64))


def cut(tokens: torch.Tensor, piece_tokens: int = 32) -> list[tuple[int, int]]:
    retriever = ContentRetriever(ContentRetriever.Config(piece_tokens=piece_tokens))
    return [(one.start, one.end) for one in retriever.passages(tokens, None)]


def drawn(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 120_000, (count,), generator=torch.Generator().manual_seed(seed))


@given(tokens_of | st.builds(lambda one, count: torch.full((count,), one), st.integers(0, 9), st.integers(0, 400)))
def test_pieces_stand_beside_each_other_and_have_the_lengths_they_may_have(tokens: torch.Tensor) -> None:
    pieces = cut(tokens)
    assert all(8 <= end - start <= 128 for start, end in pieces)
    assert [start for start, _ in pieces] == [0, *(end for _, end in pieces)][: len(pieces)]
    assert len(tokens) - (pieces[-1][1] if pieces else 0) <= 128


def test_pieces_are_as_long_as_asked_on_average() -> None:
    for asked in (32, 64, 256):
        assert len(drawn(100_000)) / len(cut(drawn(100_000), asked)) == pytest.approx(asked, rel=0.1)


def test_every_process_and_version_cuts_alike() -> None:
    """Stored pieces were cut by other processes: other cuts would not find them."""
    assert cut(drawn(300)) == GOLDEN
    assert cut(drawn(300).to(torch.int32)) == GOLDEN


@given(st.integers(0, 3000), st.integers(0, 40), st.integers(0, 40), st.integers(0, 20))
def test_an_edit_moves_the_pieces_beside_it_only(at: int, taken: int, put: int, seed: int) -> None:
    text = drawn(4000, seed)
    edited = torch.cat([text[:at], drawn(put, seed + 100), text[at + taken :]])
    before = {tuple(text[start:end].tolist()) for start, end in cut(text)}
    after = [(start, end) for start, end in cut(edited) if tuple(edited[start:end].tolist()) not in before]
    assert all(end > at - 128 for _, end in after)
    assert sum(end - start for start, end in after) <= put + 700


@pytest.fixture(scope="module")
def engine() -> Any:
    with Engine.open(config(NONE, CONTENT), spec_of(model())) as engine:
        yield engine


@settings(max_examples=20, deadline=None)
@given(offset=st.integers(0, 60), begin=st.integers(0, 60), seed=st.integers(0, 5))
def test_runs_are_found_at_every_offset_by_who_never_saw_them(engine: Any, offset: int, begin: int, seed: int) -> None:
    known = text(seed, 200)
    (cache,) = Runner(model(), spec_of(model())).prefill([known]).caches
    retriever = engine.blending.retriever
    engine.save(retriever.in_context(known), cache=cache).result()
    other = ContentRetriever(retriever.config)
    other.engine = engine
    prompt = torch.cat([text(77, offset), known[begin:], text(78, 9)])
    found = other.new_request(prompt, torch.tensor([0, len(prompt)])).result(1)
    mask, stood = found.valid_mask, found.original_positions
    assert torch.equal(known[stood[mask]], prompt[mask])
    truth = cache.layers[1].keys[0].transpose(0, 1).flatten(1)
    assert torch.equal(found.k[mask], truth[stood[mask]])
    kept = {tuple(known[start:end].tolist()) for start, end in cut(known, 16)}
    expected = torch.zeros(len(prompt), dtype=torch.bool)
    for start, end in cut(prompt, 16):
        expected[start:end] = tuple(prompt[start:end].tolist()) in kept
    assert torch.equal(mask, expected) and mask.sum() > (len(known) - begin) // 3
