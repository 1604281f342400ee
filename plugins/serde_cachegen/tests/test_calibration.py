"""Calibration: keys are taken back to before RoPE whatever the architecture, and sums become what they stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")
pytest.importorskip("kvloom_connector_transformers")

from kvloom_serde_cachegen.calibration import text  # noqa: E402
from kvloom_serde_cachegen.calibration.calibrating import Limits, calibrated  # noqa: E402
from kvloom_serde_cachegen.calibration.rope import NO_ROPE, Rope, UnknownRopeError, rope_of  # noqa: E402
from kvloom_serde_cachegen.calibration.statistics import Statistics, components, relative_to  # noqa: E402
from kvloom_serde_cachegen.measuring import Figures, context_kv  # noqa: E402

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
        ("mistral", {"sliding_window": None}, 16, False),
        ("falcon", {"alibi": False, "num_kv_heads": 2, "new_decoder_architecture": True}, 16, False),
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
    model, projected = model_of("llama"), []
    rope = rope_of(model)
    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda module, given, made: projected.append(made[0]))
    with torch.no_grad():
        keys = rope.undone(context_kv(model, torch.arange(100), torch.float32)[0])
    assert torch.allclose(keys.flatten(2), torch.stack(projected).double(), atol=1e-5)


def test_keys_that_cannot_be_taken_back_leave_the_mode_step() -> None:
    model, windows = model_of("smollm3"), torch.arange(100)[None]
    with pytest.raises(UnknownRopeError, match="different rotary embeddings, or some use none"):
        rope_of(model)
    with pytest.raises(ValueError, match="--no-klt"):
        calibrated(model, windows, name="it", klt=True)
    profile, _ = calibrated(model, windows, name="it", klt=False)
    assert profile.rotary_size == 0 and profile.transform is None and profile.weights.shape == (2, 4, 32)


@pytest.mark.parametrize(
    ("family", "more", "says"),
    [
        ("llama", rope_type("dynamic"), "rope type 'dynamic'"),
        ("deepseek_v3", MLA | {"num_key_value_heads": 4}, "K and V of different sizes"),
        ("mistral", {"sliding_window": 128}, "has layers with a window"),
        ("minimax", {}, "not every layer keeps plain K and V"),
    ],
)
def test_what_has_no_plain_kv_is_refused(family: str, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        calibrated(model_of(family, **more), torch.arange(100)[None], name="it", klt=False)


# -- what noise costs --------------------------------------------------------------------------------------------------


def windows_of(count: int, tokens: int) -> torch.Tensor:
    return torch.randint(128, (count, tokens), generator=torch.Generator().manual_seed(1))


def test_scales_that_k_and_q_share_out_differently_change_nothing() -> None:
    """Many models have the same predictions: K times a factor, and q divided by it."""
    model, windows = model_of("llama", initializer_range=0.2), windows_of(2, 60)
    one, _ = calibrated(model, windows, name="it", klt=True)
    factors = 2.0 ** torch.randint(-1, 2, (8,), generator=torch.Generator().manual_seed(2)).repeat(2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= factors.repeat(2)[:, None]
            layer.self_attn.q_proj.weight /= factors.repeat(4)[:, None]
    other, _ = calibrated(model, windows, name="it", klt=True)
    wanted = one.weights.clone()
    wanted[0] *= factors.repeat(2)
    assert torch.allclose(other.weights, wanted / wanted.log().mean(2, keepdim=True).exp(), rtol=1e-3)
    assert one.transform is not None and other.transform is not None
    assert torch.allclose(one.transform.scales[1], other.transform.scales[1], rtol=1e-3)
    assert one.identity != other.identity


def test_a_channel_that_nobody_reads_does_not_take_all_the_noise() -> None:
    model = model_of("llama", initializer_range=0.2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:, [0, 16]] = 0.0  # channel 0 of the first KV head, as its queries read it
    profile, _ = calibrated(model, windows_of(2, 60), name="it", klt=True)
    assert profile.transform is not None
    scales = profile.transform.scales[1]
    assert torch.allclose(scales[:, 0], torch.full((4,), 0.1), rtol=0.02) and bool((scales[:, 1:] > 0.11).all())


def test_a_model_is_left_as_it_was() -> None:
    model, state = model_of("llama"), torch.random.get_rng_state()
    calibrated(model, windows_of(1, 60), name="it", klt=False)
    assert all(each.requires_grad and each.grad is None for each in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


# -- statistics --------------------------------------------------------------------------------------------------------


def random_kv(layers: int, tokens: int, heads: int, size: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(2, layers, 1, heads, size, generator=generator)
    return torch.randn(2, layers, tokens, heads, size, generator=generator) * (mixing + 0.1) + mixing


def seen(kv: torch.Tensor, gradients: torch.Tensor, rope: Rope = NO_ROPE, *, pieces: int = 1) -> Statistics:
    """Each piece behind four first tokens that are unlike any other."""
    statistics = Statistics(rope, klt=True)
    for piece in kv.chunk(pieces, 2):
        statistics.see(torch.cat([piece[:, :, :4] + 1e3, piece], 2))
    for piece in gradients.chunk(pieces, 2):
        statistics.see_gradients(torch.cat([piece[:, :, :4] + 1e3, piece], 2))
    return statistics


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_that_rotate_together_cost_the_same(interleaved: bool) -> None:
    gradients, rope = random_kv(2, 50, 3, 8), Rope(torch.zeros(2, dtype=torch.float64), interleaved)
    statistics = seen(gradients, gradients, rope)
    squares = gradients.double().square().sum(2)
    for pair in [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]:
        squares[0][..., pair] = squares[0][..., pair].mean(-1, keepdim=True)
    rms = squares.flatten(2).sqrt()
    costs = rms.maximum(0.1 * rms.mean(2, keepdim=True))
    assert torch.allclose(statistics.costs(), costs)
    weights = statistics.weights().double()
    assert torch.allclose(weights.log().mean(2), torch.zeros(2, 2, dtype=torch.float64), atol=1e-6)
    assert torch.allclose((weights * costs).std(2), torch.zeros(2, 2, dtype=torch.float64), atol=1e-3)


def test_gradients_by_rotated_keys_are_taken_back_as_keys_are() -> None:
    rope = Rope(torch.tensor([1.0, 0.3], dtype=torch.float64), interleaved=False)
    keys = torch.randn(1, 30, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    keys.requires_grad_()
    wanted = torch.randn(keys.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    (gradient,) = torch.autograd.grad((rope.undone(keys) * wanted).sum(), keys)
    assert torch.allclose(rope.undone(gradient), wanted)


@pytest.mark.parametrize("pieces", [1, 4])
def test_the_transform_decorrelates_and_comes_back(pieces: int) -> None:
    kv, gradients = random_kv(2, 400, 2, 32), random_kv(2, 40, 2, 32, seed=4)
    statistics = seen(kv, gradients, pieces=pieces)
    transform, costs = statistics.transform(), statistics.costs()
    assert transform.ranks(0) == transform.ranks(1) == [64, 64]
    assert torch.allclose(transform.scales, (costs / costs.mean(2, keepdim=True)).float())
    deviations = kv.flatten(3).double().std(2, correction=0).mean(2)
    assert torch.allclose(transform.sigmas, relative_to(deviations, costs.mean(2)).float(), rtol=1e-4)
    for plane in (0, 1):
        for layer in (0, 1):
            x = kv[plane, layer].flatten(1).double()
            mean, scale = transform.means[plane, layer].double(), transform.scales[plane, layer].double()
            assert torch.allclose(mean, x.mean(0), atol=1e-5)
            exponents = transform.exponents[plane][layer].double()
            vectors = transform.bases[plane][layer].double() * 2.0 ** -exponents[:, None] / 127
            parts = ((x - mean) * scale) @ vectors.T
            spread = parts.std(0)
            assert bool((spread[:-1] > 0.98 * spread[1:]).all()), "the greatest first"
            covariance = torch.cov(parts.T)
            assert float(covariance.fill_diagonal_(0).abs().max()) < 0.01 * float(spread[0] ** 2)
            back = parts @ vectors / scale + mean
            assert float((back - x).square().sum() / x.square().sum()) < 5e-3


def test_steps_do_equal_harm_but_stay_near_what_varies() -> None:
    deviations = torch.tensor([[1.0, 1.5], [2.0, 1.0]])
    assert torch.allclose(relative_to(deviations, 1 / deviations), deviations)
    steps = relative_to(deviations, torch.ones(2, 2))
    assert torch.allclose(steps, steps[0, 0].expand(2, 2)) and float(steps.prod()) == pytest.approx(3.0)
    steps = relative_to(torch.ones(2, 2), torch.tensor([[1.0, 1.0], [1.0, 1e4]]))
    assert torch.allclose(steps, torch.tensor([[2.0, 2.0], [2.0, 0.5]]))


def test_components_that_hardly_vary_are_left_out() -> None:
    deviations = torch.cat([torch.full((40,), 1.0), torch.full((24,), 0.01), torch.full((32,), 1e-9)]).double()
    turned = torch.linalg.qr(torch.randn(96, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    covariance = turned @ torch.diag(deviations.square()) @ turned.T
    kept = components(covariance, 1.0)
    assert kept.shape == (64, 96) and torch.allclose(kept @ kept.T, torch.eye(64, dtype=torch.float64), atol=1e-8)
    assert components(covariance, 1e9).shape == (32, 96)
    assert components(covariance[:48, :48], 1e9).shape == (32, 48)
    assert components(torch.eye(48, dtype=torch.float64), 1.0).shape == (48, 48)
    assert bool((kept.gather(1, kept.abs().argmax(1, keepdim=True)) > 0).all())


def test_too_little_for_a_transform_is_said() -> None:
    assert seen(random_kv(1, 64, 1, 16), random_kv(1, 8, 1, 16)).transform().ranks(0) == [16]
    with pytest.raises(ValueError, match="63 tokens are too few for klt, which needs 64"):
        seen(random_kv(1, 63, 1, 32), random_kv(1, 8, 1, 32)).transform()


@pytest.mark.parametrize(
    ("change", "passed"),
    [({}, True), ({"kl": 2e-3}, False), ({"dnll": 0.02}, False), ({"dnll": -0.02}, True), ({"top1": 0.97}, False)],
)
def test_each_limit_counts(change: dict[str, float], passed: bool) -> None:
    figures = Figures(dnll=0.01, kl=1e-3, top1=0.98, bits_per_value=3.0, k_error=0.1, v_error=0.1)
    assert Limits().allow(replace(figures, **change)) == passed


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


def test_every_text_has_its_share() -> None:
    rows = text.windows(Letters(), ["a" * 100, "b" * 50, "c" * 50], length=6, count=8)
    assert [chr(row[1]) for row in rows] == [*"aaaabbcc"]


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="image is not a text"):
        text.read([tmp_path / "image"], tokens=10)
