"""Calibration: keys are taken back to before RoPE whatever the architecture, and sums become what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")
pytest.importorskip("kvloom_connector_transformers")

from kvloom_serde_cachegen.calibration import text  # noqa: E402
from kvloom_serde_cachegen.calibration.calibrating import calibrated  # noqa: E402
from kvloom_serde_cachegen.calibration.capture import run, seen_by  # noqa: E402
from kvloom_serde_cachegen.calibration.rope import NO_ROPE, Rope, UnknownRopeError, rope_of  # noqa: E402
from kvloom_serde_cachegen.calibration.statistics import Statistics, components  # noqa: E402

transformers.logging.set_verbosity_error()

SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
MLA = {
    "n_routed_experts": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


def model_of(family: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **more})
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def rope_type(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}}


# -- RoPE --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "more", "size", "interleaved"),
    [
        ("llama", {}, 16, False),
        ("llama", rope_type("linear"), 16, False),
        ("llama", rope_type("yarn", original_max_position_embeddings=128), 16, False),
        ("llama", rope_type("llama3", low_freq_factor=1.0, high_freq_factor=4.0,
                            original_max_position_embeddings=128), 16, False),
        ("qwen3", {"head_dim": 16}, 16, False),
        ("mistral", {"sliding_window": 8}, 16, False),
        ("gpt_oss", {"head_dim": 16, "num_local_experts": 4}, 16, False),
        ("phi", {}, 8, False),
        ("gpt_neox", {"num_key_value_heads": None}, 4, False),
        ("cohere", {}, 16, True),
        ("glm", {"head_dim": 16}, 8, True),
        ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4}, 0, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_how_keys_are_rotated_is_found(
    family: str, more: dict[str, Any], size: int, interleaved: bool, dtype: torch.dtype
) -> None:
    rope = rope_of(model_of(family, dtype, **more))
    assert (rope.size, rope.interleaved) == (size, interleaved)


def test_keys_before_rope_are_what_the_projection_gave() -> None:
    model = model_of("llama")
    rope, projected, seen = rope_of(model), [], []
    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda module, given, made: projected.append(made[0]))
    with seen_by(lambda layer, query, keys, values: seen.append(rope.undone(keys)), model):
        run(model, torch.arange(100))
    for keys, wanted in zip(seen, projected, strict=True):
        assert torch.allclose(keys.transpose(0, 1).flatten(1), wanted.double(), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "more", "says"),
    [
        ("llama", rope_type("dynamic"), "'dynamic' rotates by the length"),
        ("smollm3", {}, "in several ways, or some of them do not"),
        ("gemma3_text", {"head_dim": 16, "num_hidden_layers": 6}, "in several ways"),
    ],
)
def test_keys_that_cannot_be_taken_back_leave_the_mode_step(family: str, more: dict[str, Any], says: str) -> None:
    model, windows = model_of(family, **more), torch.arange(100)[None]
    with pytest.raises(UnknownRopeError, match=says):
        rope_of(model)
    with pytest.raises(ValueError, match="--no-klt"):
        calibrated(model, windows, name="it", klt=True)
    profile, _ = calibrated(model, windows, name="it", klt=False)
    assert profile.rotary_size == 0 and profile.transform is None and profile.weights.shape == (
        model.config.num_hidden_layers, 32,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "more", "says"),
    [
        ("deepseek_v3", MLA | {"num_key_value_heads": 4}, "there is no profile for MLA"),
        ("falcon", {"alibi": False}, "attention of its own"),
        ("minimax", {}, r"seen in the layers \[0, 2\] only"),
    ],
)
def test_what_has_no_plain_kv_is_refused(family: str, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        calibrated(model_of(family, **more), torch.arange(100)[None], name="it", klt=False)


def test_a_model_is_left_as_it_was() -> None:
    model = model_of("llama")
    before, calls = model(torch.arange(9)[None]).logits, []
    with seen_by(lambda *seen: calls.append(seen), model):
        run(model, torch.arange(9))
    with pytest.raises(IndexError), seen_by(lambda *seen: calls.append(seen), model):
        run(model, torch.tensor([10**6]))
    assert len(calls) == 4 and model.config._attn_implementation == "sdpa"
    assert torch.equal(model(torch.arange(9)[None]).logits, before) and len(calls) == 4


# -- statistics --------------------------------------------------------------------------------------------------------


def random_layers(layers: int, heads: int, tokens: int, size: int, groups: int = 2) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)

    def some(count: int) -> torch.Tensor:
        mixing = torch.randn(count, 1, size, generator=generator)
        return torch.randn(count, tokens, size, generator=generator) * (mixing + 0.1) + mixing

    return [(some(heads * groups), some(heads), some(heads)) for _ in range(layers)]


def seen(layers: list[tuple[torch.Tensor, ...]], rope: Rope = NO_ROPE, *, pieces: int = 1) -> Statistics:
    statistics = Statistics(rope, klt=True)
    tokens = layers[0][0].shape[1] // pieces
    for piece in range(pieces):
        for layer, planes in enumerate(layers):
            statistics.see(layer, *(plane[:, piece * tokens : (piece + 1) * tokens] for plane in planes))
    return statistics


@pytest.mark.parametrize("interleaved", [False, True])
def test_steps_of_k_follow_the_queries_of_their_group(interleaved: bool) -> None:
    layers, rope = random_layers(2, 3, 50, 8), Rope(torch.ones(2, dtype=torch.float64), interleaved)
    weights = seen(layers, rope).weights()
    assert torch.allclose(weights.mean(1), torch.ones(2))
    for (query, _, _), weight in zip(layers, weights, strict=True):
        squares = query.double().square().view(3, 2, 50, 8).mean((1, 2))
        pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
        for pair in pairs:
            squares[:, pair] = squares[:, pair].mean(1, keepdim=True)
        relative = 1 / squares.sqrt().flatten()
        assert torch.allclose(weight, (relative / relative.mean()).float(), rtol=1e-5)


def test_scales_that_k_and_q_share_out_differently_change_nothing() -> None:
    """Of one model there are many with the same predictions: K times something, q divided by it."""
    layers = random_layers(1, 1, 64, 32)
    factors = 4.0 ** torch.arange(-2, 2).repeat(8)
    other = [(query / factors, keys * factors, values) for query, keys, values in layers]
    one, two = seen(layers).weights()[0], seen(other).weights()[0] / factors
    assert torch.allclose(one / one.mean(), two / two.mean(), rtol=1e-5)


def test_a_channel_that_nobody_asks_about_does_not_take_all_the_noise() -> None:
    query, keys, values = random_layers(1, 1, 64, 32)[0]
    query[..., 0] = 0
    assert 1 < seen([(query, keys, values)]).weights()[0, 0] < 33


@pytest.mark.parametrize("pieces", [1, 4])
def test_the_transform_decorrelates_and_comes_back(pieces: int) -> None:
    layers = random_layers(2, 2, 400, 32)
    statistics = seen(layers, pieces=pieces)
    transform = statistics.transform()
    noise = 1 / statistics.weights()
    assert torch.allclose(transform.scales[0], noise / noise.mean(1, keepdim=True), rtol=1e-5)
    assert transform.ranks(0) == transform.ranks(1) == [64, 64]
    assert bool((transform.scales[1] == 1).all()) and torch.allclose(transform.scales.mean(2), torch.ones(2, 2))
    for plane in (0, 1):
        for layer, planes in enumerate(layers):
            x = planes[1 + plane].transpose(0, 1).flatten(1).double()
            mean, scale = transform.means[plane, layer].double(), transform.scales[plane, layer].double()
            assert torch.allclose(mean, x.mean(0), atol=1e-5)
            assert torch.allclose(transform.sigmas[plane, layer].double(), x.std(0, correction=0).mean(), rtol=1e-5)
            exponents = transform.exponents[plane][layer].double()
            vectors = transform.bases[plane][layer].double() * 2.0 ** -exponents[:, None] / 127
            parts = ((x - mean) * scale) @ vectors.T
            deviations = parts.std(0)
            assert bool((deviations[:-1] > 0.98 * deviations[1:]).all()), "the greatest first"
            covariance = torch.cov(parts.T)
            assert float(covariance.fill_diagonal_(0).abs().max()) < 0.01 * float(deviations[0] ** 2)
            back = parts @ vectors / scale + mean
            assert float((back - x).square().sum() / x.square().sum()) < 3e-3


def test_components_that_hardly_vary_are_left_out() -> None:
    deviations = torch.cat([torch.full((40,), 1.0), torch.full((24,), 0.01), torch.full((32,), 1e-9)]).double()
    turned = torch.linalg.qr(torch.randn(96, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    covariance = turned @ torch.diag(deviations.square()) @ turned.T
    kept = components(covariance, least=1.0)
    assert kept.shape == (64, 96) and torch.allclose(kept @ kept.T, torch.eye(64, dtype=torch.float64), atol=1e-8)
    assert components(covariance, least=1e9).shape == (32, 96)
    assert components(covariance[:48, :48], least=1e9).shape == (32, 48)
    assert components(torch.eye(48, dtype=torch.float64), least=1.0).shape == (48, 48)
    assert bool((kept.gather(1, kept.abs().argmax(1, keepdim=True)) > 0).all())


def test_too_little_for_a_transform_is_said() -> None:
    assert seen(random_layers(1, 1, 64, 16)).transform().ranks(0) == [16]
    with pytest.raises(ValueError, match="63 tokens are too few for klt, which needs 64"):
        seen(random_layers(1, 1, 63, 32)).transform()


def test_layers_of_several_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="the KV of layer 1 is"):
        seen([random_layers(1, 1, 64, 32)[0], random_layers(1, 2, 64, 32)[0]])


# -- text --------------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer: a token for each letter, and one to start with."""

    def __call__(self, text: str, **how: Any) -> Any:
        ids = [1, *map(ord, text)] if how.get("add_special_tokens", True) else [*map(ord, text)]
        return type("Encoding", (), {"input_ids": ids})


def test_what_is_judged_by_was_not_calibrated_on(tmp_path: Path) -> None:
    files = []
    for number, letters in enumerate(("ab", "cd")):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text(letters[0] * 80 + letters[1] * 20, encoding="utf-8")
    ours, theirs = text.read(files, tokens=1000)
    assert [set(each) for each in ours] == [{"a"}, {"c"}] and [set(each) for each in theirs] == [{"b"}, {"d"}]
    assert len(text.read(files, tokens=1)[0][0]) < 64


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=4), st.integers(2, 40), st.integers(1, 9))
def test_windows_are_whole_spread_and_never_overlap(lengths: list[int], length: int, count: int) -> None:
    texts = ["".join(chr(256 + 1000 * number + at) for at in range(size)) for number, size in enumerate(lengths)]
    rows = text.windows(Letters(), texts, length=length, count=count)
    possible = sum(size // (length - 1) for size in lengths)
    assert rows.shape == (min(count, possible), length) and bool((rows[:, 0] == 1).all())
    rest = rows[:, 1:].flatten()
    assert len(rest.unique()) == len(rest)
    assert bool((rows[:, 2:] - rows[:, 1:-1] == 1).all()), "a window is one piece of text"


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="image is not a text"):
        text.read([tmp_path / "image"], tokens=10)
