"""Measurements of a codec: none where nothing is lost, much where all is, and every stored byte counts."""

from __future__ import annotations

import math

import pytest
import torch

from kvloom import Buffers, Chunk
from kvloom_serde_cachegen import measuring
from kvloom_serde_cachegen.measuring import Figures, Quality, measure
from kvloom_serde_cachegen.serializer import CacheGenSerializer

transformers = pytest.importorskip("transformers")
CONTEXT, CONTINUATION = 21, 6
LAYERS, HEADS, HEAD_SIZE = 3, 2, 8


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=HEADS, head_dim=HEAD_SIZE,
        initializer_range=0.4,  # so that attention looks at something
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    return torch.randint(50, (3, CONTEXT + CONTINUATION), generator=torch.Generator().manual_seed(1))


def same(kv: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
    return kv.clone(), kv.numel() * 2


def nothing(kv: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
    return torch.zeros_like(kv), 0


def test_nothing_lost_is_nothing_measured(model, windows) -> None:
    quality = measure(model, windows, {"same": same}, context=CONTEXT, chunk_tokens=8)["same"]
    assert quality.mean == Figures(dnll=0.0, kl=0.0, top1=1.0, bits_per_value=16.0, k_error=0.0, v_error=0.0)
    assert quality.tokens == 3 * (CONTINUATION - 1)


def test_where_all_is_lost_predictions_go_astray_and_each_codec_is_measured_on_its_own(model, windows) -> None:
    both = measure(model, windows, {"nothing": nothing, "same": same}, context=CONTEXT)
    lost = both["nothing"].mean
    assert lost.kl > 0.1 and lost.top1 < 0.9
    assert (lost.bits_per_value, lost.k_error, lost.v_error) == (0.0, 1.0, 1.0)
    assert both["same"].mean.kl == 0.0


def test_figures_are_those_of_predictions_that_anybody_can_make(model, windows) -> None:
    """The model reads the whole text at once, with V of the context halved on the way."""

    def halved(kv: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
        kv = kv.clone()
        kv[1] *= 0.5
        return kv, 1

    figures = measure(model, windows[:1], {"": halved}, context=CONTEXT, dtype=torch.float32)[""].mean
    with torch.no_grad():
        cache = transformers.DynamicCache()
        model(windows[:1, :CONTEXT], past_key_values=cache)
        for layer in cache.layers:
            layer.values *= 0.5
        got = model(windows[:1, CONTEXT:], past_key_values=cache).logits[0, :-1].double().log_softmax(-1)
        expected = model(windows[:1]).logits[0, CONTEXT:-1].double().log_softmax(-1)
    targets = windows[0, CONTEXT + 1 :, None]
    assert figures.kl == pytest.approx((expected.exp() * (expected - got)).sum(-1).mean().item(), rel=1e-3)
    assert figures.dnll == pytest.approx((expected - got).gather(1, targets).mean().item(), rel=1e-3)
    assert figures.top1 == pytest.approx((expected.argmax(-1) == got.argmax(-1)).double().mean().item())
    assert (figures.k_error, figures.v_error) == (0.0, pytest.approx(0.5))


def test_a_codec_gets_chunks_with_their_positions_and_the_rest_at_the_end(model, windows) -> None:
    calls = []

    def spy(kv: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
        calls.append((start, kv.clone()))
        return kv, 100

    quality = measure(model, windows[:1], {"spy": spy}, context=CONTEXT, chunk_tokens=8)["spy"]
    assert [(start, kv.shape) for start, kv in calls] == [
        (0, (2, LAYERS, 8, HEADS * HEAD_SIZE)),
        (8, (2, LAYERS, 8, HEADS * HEAD_SIZE)),
        (16, (2, LAYERS, 5, HEADS * HEAD_SIZE)),
    ]
    kv = measuring.context_kv(model, windows[0, :CONTEXT]).flatten(3)
    assert torch.equal(torch.cat([part for _, part in calls], dim=2), kv)
    assert quality.mean.bits_per_value == 300 * 8 / kv.numel()


def test_kv_has_the_layout_of_kvloom(model, windows) -> None:
    kv = measuring.context_kv(model, windows[0, :CONTEXT], torch.float32)
    assert kv.shape == (2, LAYERS, CONTEXT, HEADS, HEAD_SIZE)
    layers = model(windows[:1, :CONTEXT], use_cache=True).past_key_values.layers
    torch.testing.assert_close(kv[0, 2, 7, 1], layers[2].keys[0, 1, 7])
    torch.testing.assert_close(kv[1, 0, 3, 0], layers[0].values[0, 0, 3])


def test_a_serializer_is_a_codec(model, windows) -> None:
    modes = {"lossless": {"mode": "lossless"}, "fine": {"quality": 0.1}, "coarse": {"quality": 2.0}}
    codecs = {
        name: measuring.through(CacheGenSerializer(CacheGenSerializer.Config(**config)))
        for name, config in modes.items()
    }
    kv = torch.randn((2, LAYERS, 30, 64)).to(torch.bfloat16)
    back, size = codecs["lossless"](kv, 0)
    assert torch.equal(back, kv) and 0 < size < kv.numel() * 2
    found = {name: each.mean for name, each in measure(model, windows, codecs, context=CONTEXT).items()}
    assert found["lossless"].kl == 0.0
    assert 0.0 < found["fine"].kl < found["coarse"].kl
    assert found["fine"].k_error < found["coarse"].k_error


def test_a_serializer_is_told_where_a_chunk_starts(model, windows) -> None:
    class Spy(CacheGenSerializer):
        def encode(self, chunk: Chunk) -> Buffers:
            starts.append(chunk.start)
            return super().encode(chunk)

    starts: list[int | None] = []
    measure(model, windows[:1], {"": measuring.through(Spy(Spy.Config()))}, context=CONTEXT, chunk_tokens=8)
    assert starts == [0, 8, 16]


def test_means_and_standard_errors_over_windows() -> None:
    quality = Quality(tuple(Figures(each, 0.0, 1.0, 3.0, 0.1, 0.2) for each in (1.0, 2.0, 6.0)), 30)
    assert quality.mean.dnll == 3.0 and quality.mean.bits_per_value == 3.0
    assert quality.error.dnll == pytest.approx(math.sqrt((4 + 1 + 9) / 2 / 3))
    assert quality.error.kl == 0.0
    assert math.isnan(Quality(quality.windows[:1], 10).error.kl)


def test_progress_and_windows_with_nothing_to_predict(model, windows) -> None:
    seen = []
    measure(model, windows, {}, context=CONTEXT, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    for bad, context in [(windows[:0], CONTEXT), (windows[0], 4), (windows, 0), (windows[:, : CONTEXT + 1], CONTEXT)]:
        with pytest.raises(ValueError, match="nothing to predict"):
            measure(model, bad, {}, context=context)
