"""Blending equals the model's own results where nothing is approximate."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
from blend_models import CONFIGS, SEPARATOR, config, joined, model, text, whole

from kvloom_blend import blended
from kvloom_blend.executors import NoneExecutor
from kvloom_blend.executors.static import RatioConfig, StaticSession
from kvloom_blend.runner.given import GivenTask, kv_of
from kvloom_blend.runner.runner import Runner
from kvloom_connector_transformers import spec_of

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
MODELS = pytest.mark.parametrize("name", CONFIGS)
TEXTS = [text(seed) for seed in range(4)]
PROMPT = joined(*TEXTS, text(9, 12))


@lru_cache
def opened(name: str, dtype: torch.dtype = torch.float32) -> Runner:
    subject = model(name, dtype)
    return Runner(subject, spec_of(subject))


def computed(runner: Runner, prompt: torch.Tensor) -> torch.Tensor:
    """The model's own KV: `[2, layers, tokens, hidden]`."""
    return kv_of(runner.prefill([prompt]).caches[0])


EXECUTORS: tuple[dict[str, Any], ...] = (
    {"executor": "full"},
    {"executor": "cacheblend", "recompute_ratio": 1.0},
    {"executor": "cacheblend", "recompute_ratio": 1.0, "check_layers": [1, 2]},
    {"executor": "hybrid", "recompute_ratio": 1.0},
    {"executor": "epic", "recompute_ratio": 1.0},
)


# Every executor with every model, half of them slow; in each half, every model and every executor with both dtypes.
EXACT = [
    pytest.param(
        name, [*TOLERANCE][(row + column) // 2 % 2], executor, marks=[pytest.mark.slow] if (row + column) % 2 else []
    )
    for row, name in enumerate(CONFIGS)
    for column, executor in enumerate(EXECUTORS)
]


@pytest.mark.parametrize(("name", "dtype", "executor"), EXACT, ids=str)
def test_everything_computed_again_is_a_whole_prefill(name: str, dtype: torch.dtype, executor: dict[str, Any]) -> None:
    subject = model(name, dtype)
    prompt = joined(*TEXTS[:2], text(9, 12))
    with blended(subject, config(executor)) as it:
        for one in TEXTS[:2]:
            assert it.remember(one) == len(one)
        done = it.prefill(prompt, keep_logits=3, store=False)
    assert done.blended_tokens == sum(map(len, TEXTS[:2]))
    assert (done.logits[0].float() - whole(subject, prompt, 3)).abs().max() <= TOLERANCE[dtype]


@DTYPES
@MODELS
def test_garbage_that_is_computed_again_does_no_harm(name: str, dtype: torch.dtype) -> None:
    subject, runner = model(name, dtype), opened(name, dtype)
    kv = torch.full((2, 4, len(PROMPT), runner.spec.hidden_dim), 1e4).to(dtype)
    task = GivenTask(kv, torch.ones(len(PROMPT), dtype=torch.bool), torch.zeros(len(PROMPT), dtype=torch.long))
    done = runner.blend([PROMPT], task, Chosen(1.0))
    assert (done.logits[0].float() - whole(subject, PROMPT)).abs().max() <= TOLERANCE[dtype]


class Chosen(NoneExecutor):
    """A share of the tokens, at random."""

    def __init__(self, ratio: float) -> None:
        super().__init__(RatioConfig(recompute_ratio=ratio))

    def begin(self, request: Any) -> Any:
        scores = torch.rand(len(request.valid_mask), generator=torch.Generator().manual_seed(5))
        session = StaticSession(request)
        session.chosen = session.largest(scores, self.config.recompute_ratio)  # type: ignore[attr-defined]
        return session


# Every model with both dtypes and both ratios.
RATIOS = [
    (name, dtype, [0.0, 0.3][(row + half) % 2])
    for row, name in enumerate(CONFIGS)
    for half, dtype in enumerate(TOLERANCE)
]


@pytest.mark.parametrize(("name", "dtype", "ratio"), RATIOS, ids=str)
def test_over_true_kv_nothing_is_lost(name: str, dtype: torch.dtype, ratio: float) -> None:
    """The rows, their mask and their places are right, or this would not come out."""
    subject, runner = model(name, dtype), opened(name, dtype)
    kv = computed(runner, PROMPT)
    valid = torch.arange(len(PROMPT)) < len(PROMPT) - 12
    valid[[SEPARATOR, 41, 60]] = False
    before = kv.clone()
    kv[:, :, ~valid] = float("nan")
    task = GivenTask(kv, valid, torch.where(valid, torch.arange(len(PROMPT)), 0))
    done = runner.blend([PROMPT], task, Chosen(ratio), keep_logits=5)
    assert (done.logits[0].float() - whole(subject, PROMPT, 5)).abs().max() <= TOLERANCE[dtype]
    assert torch.equal(kv[:, :, valid], before[:, :, valid]), "the retrieved KV was written to"
    got = done.caches[0].layers[-1].keys[0].transpose(0, 1).flatten(1)
    assert (got.float() - before[0, -1].float()).abs().max() <= TOLERANCE[dtype]


@MODELS
def test_kv_that_only_moved_is_turned_to_where_it_stands(name: str) -> None:
    """A text computed alone at positions 0, ..., found behind nothing but itself further on: K must be its own."""
    subject, runner = model(name), opened(name)
    first, moved = computed(runner, PROMPT), []
    for layer, rotation in enumerate(runner.rotations):
        assert rotation is not None
        stood, stands = torch.arange(len(PROMPT)) + 1000, torch.arange(len(PROMPT))
        moved.append(rotation.apply(first[0, layer], rotation.turn(stands, stood)))
    kv = torch.stack([torch.stack(moved), first[1]])
    valid = torch.arange(len(PROMPT)) < len(PROMPT) - 12
    done = runner.blend(
        [PROMPT],
        GivenTask(kv, valid, torch.where(valid, torch.arange(len(PROMPT)) + 1000, 0)),
        NoneExecutor(RatioConfig()),
    )
    assert (done.logits[0] - whole(subject, PROMPT)).abs().max() <= 1e-4


class Asking(NoneExecutor):
    """Keeps what the engine says of the question's attention."""

    def begin(self, request: Any) -> Any:
        self.attention = request.attention()
        return super().begin(request)


def test_the_questions_attention_is_its_weights_times_the_length_of_v() -> None:
    subject = copy.deepcopy(model("llama"))  # two heads of Q share each of K and V
    runner = Runner(subject, spec_of(subject))
    valid = torch.arange(len(PROMPT)) < len(PROMPT) - 12
    valid[SEPARATOR] = False
    executor = Asking(RatioConfig())
    kv = computed(runner, PROMPT)
    runner.blend([PROMPT], GivenTask(kv, valid, torch.where(valid, torch.arange(len(PROMPT)), 0)), executor)
    subject.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = torch.stack(subject(PROMPT[None], output_attentions=True).attentions)[:, 0]  # [layers, heads, Q, K]
    lengths = kv[1].unflatten(2, runner.heads).norm(dim=-1)  # [layers, tokens, heads of V]
    shared = weights.shape[1] // lengths.shape[2]
    expected = (weights[:, :, ~valid].sum(2) * lengths.transpose(1, 2).repeat_interleave(shared, 1)).sum((0, 1))
    assert torch.allclose(executor.attention, expected, rtol=1e-3)


# What the question attends to is what the others choose by.
@pytest.mark.parametrize("executor", ["cacheblend", "none", "epic"])
def test_a_later_token_never_alters_kv_that_was_computed_before_it(executor: str) -> None:
    subject = model("llama")
    planes = []
    for last in (text(9, 12), text(10, 12)):
        prompt = joined(*TEXTS, last)
        with blended(subject, config({"executor": executor})) as it:
            for one in TEXTS:
                it.remember(one)
            cache = it.prefill(prompt, store=False).caches[0]
        planes.append(torch.stack([torch.stack([one.keys[0], one.values[0]]) for one in cache.layers])[..., :-12, :])
    assert torch.allclose(planes[0], planes[1], atol=1e-6)


def test_several_prompts_at_once_come_to_what_each_comes_to() -> None:
    subject = model("llama")
    prompts = [joined(TEXTS[0], TEXTS[1], text(9, 12)), text(8, 3), joined(text(7), TEXTS[2], text(6, 5)), TEXTS[3]]
    with blended(subject, config({"executor": "cacheblend", "recompute_ratio": 0.3})) as it:
        for one in TEXTS:
            it.remember(one)
        alone = [it.prefill(prompt, store=False) for prompt in prompts]
        together = it.prefill(prompts, store=False)
    for number, one in enumerate(alone):
        assert torch.allclose(together.logits[number], one.logits[0], atol=1e-4), number
        for a, b in zip(together.caches[number].layers, one.caches[0].layers, strict=True):
            assert torch.allclose(a.keys, b.keys, atol=1e-5) and torch.allclose(a.values, b.values, atol=1e-5)
    assert together.blended_tokens == sum(one.blended_tokens for one in alone)
