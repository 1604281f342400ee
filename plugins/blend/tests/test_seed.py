"""CacheBlend's own names do what its documents say."""

from __future__ import annotations

import pytest
import torch
from blend_models import config, model, text
from hypothesis import given
from hypothesis import strategies as st

from kvloom import BlendRetrieverTask, Engine
from kvloom_blend import (
    CacheBlendImpl,
    SPTBlendRetriever,
    SPTBlendRetrieverTask,
    create_index,
    indices_to_mask,
    mask_to_indices,
)
from kvloom_blend.rotation import Rotation
from kvloom_connector_transformers import spec_of
from kvloom_testkit.executors.sessions import batch_of


@given(st.lists(st.booleans(), max_size=50))
def test_masks_and_indices_are_each_others_inverse(flags: list[bool]) -> None:
    mask = torch.tensor(flags, dtype=torch.bool)
    indices = mask_to_indices(mask)
    assert indices.tolist() == [place for place, flag in enumerate(flags) if flag]
    assert torch.equal(indices_to_mask(indices, len(flags)), mask)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_an_index_is_of_one_dimension(dim: int) -> None:
    tensor, wanted = torch.arange(60).reshape(3, 4, 5), torch.tensor([2, 0])
    assert torch.equal(tensor[create_index(3, dim, wanted)], tensor.index_select(dim, wanted))
    with pytest.raises(IndexError):
        create_index(3, 3, wanted)


def test_cacheblend_layer_by_layer() -> None:
    """The first layer passes through, the second selects, later ones go on with the selected and fewer Q."""
    batch = batch_of((30, 20), valid=0.8, seed=3, dtype=torch.float32)
    starts, request = batch.request.query_start_loc, batch.request
    before = starts.clone()
    impl, going = CacheBlendImpl(0.25), torch.arange(50)
    for layer in range(3):
        output = impl.blend(
            layer, *batch.retrieved[:, layer], request.valid_mask, batch.positions, batch.fresh_q[layer, going],
            *batch.fresh[:, layer, going], batch.positions[going], starts, 0,
        )  # fmt: skip
        if layer == 0:
            assert output.query_start_loc is None and len(output.q) == 50
        if layer == 1:
            counts = [int(request.valid_mask[a:b].sum()) for a, b in ((0, 30), (30, 50))]
            missing = [int((~request.valid_mask[a:b]).sum()) for a, b in ((0, 30), (30, 50))]
            assert output.query_start_loc is not None
            for count, miss, got in zip(counts, missing, output.query_start_loc.diff().tolist(), strict=True):
                assert miss + round(0.25 * count) <= got <= miss + round(0.25 * count) + 1
            deviation = (batch.fresh[1, 1] - batch.retrieved[1, 1]).square().mean(1)
            picked = torch.zeros(50, dtype=torch.bool)
            picked[output.local_indices] = True
            left = request.valid_mask & ~picked
            for a, b in ((0, 29), (30, 49)):  # but for the last token of each, which always goes on
                assert deviation[a:b][left[a:b]].max() <= deviation[a:b][(picked & request.valid_mask)[a:b]].min()
        going = going[output.local_indices]
        assert output.k.shape == output.v.shape == (50, batch.retrieved.shape[-1])
    assert torch.equal(starts, before)


def test_k_is_turned_by_the_encoders_that_are_set() -> None:
    rotation = Rotation(1e4 ** -(torch.arange(4).float() / 4), head_size=8)
    batch = batch_of((30,), valid=1.0, dtype=torch.float32)
    stood = torch.arange(30) + 500

    def encode(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q, rotation.apply(k, rotation.turn(torch.zeros_like(positions), positions))

    def decode(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q, rotation.apply(k, rotation.turn(positions, torch.zeros_like(positions)))

    impl = CacheBlendImpl(0.0)
    impl.set_positional_encoder(encode)
    impl.set_reverse_positional_encoder(decode)
    moved = rotation.apply(batch.retrieved[0, 0], rotation.turn(batch.positions, stood))
    going = torch.arange(30)
    for layer in range(3):
        output = impl.blend(
            layer, moved, batch.retrieved[1, 0], batch.request.valid_mask, stood, batch.fresh_q[layer, going],
            *batch.fresh[:, layer, going], batch.positions[going], batch.request.query_start_loc, 0,
        )  # fmt: skip
        going = going[output.local_indices]
    assert torch.allclose(output.k[:29], batch.retrieved[0, 0][:29], atol=1e-5)


def test_a_later_layer_of_no_batch() -> None:
    batch = batch_of((30,))
    with pytest.raises(ValueError, match="begin with layer 0"):
        CacheBlendImpl(0.1).blend(
            1, *batch.retrieved[:, 1], batch.request.valid_mask, batch.positions, batch.fresh_q[1],
            *batch.fresh[:, 1], batch.positions, batch.request.query_start_loc, 0,
        )  # fmt: skip


def test_segments_end_with_the_special_token() -> None:
    """[x, x, x, spt, y, y, spt, z, z, z, z] is three segments, each kept by its own tokens."""
    x, y, z, spt = text(1, 3), text(2, 2), text(3, 4), torch.tensor([7])
    engine = Engine.open(config({"executor": "none"}), spec_of(model()))
    with engine:
        retriever = SPTBlendRetriever(spt, engine, None)
        segments = [torch.cat([x, spt]), torch.cat([y, spt]), z]
        for one in (segments[1], segments[2]):
            (cache,) = _prefilled(one)
            engine.save(retriever.alone(one), cache=cache).result()
        tokens = torch.cat(segments)
        task = retriever.new_request(tokens, torch.tensor([0, len(tokens)]))
        assert isinstance(task, SPTBlendRetrieverTask) and isinstance(task, BlendRetrieverTask)
        result = task.result(0)
        assert result.valid_mask.tolist() == [False] * 4 + [True] * 7
        assert result.original_positions.tolist() == [0] * 4 + [0, 1, 2] + [0, 1, 2, 3]


def _prefilled(tokens: torch.Tensor) -> list[object]:
    from kvloom_blend import Runner

    return Runner(model(), spec_of(model())).prefill([tokens]).caches
