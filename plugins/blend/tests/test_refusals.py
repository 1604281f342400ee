"""Invalid settings are refused in a line that names them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from blend_models import SEPARATOR, config, joined, model, text
from typer.testing import CliRunner

from kvloom import BlendRequest, ConfigError, Engine, EngineConfig, KVSpec
from kvloom.cli.main import app
from kvloom_blend import CacheBlendImpl, blended
from kvloom_blend.executors import EXECUTORS, NoneExecutor

SPEC = KVSpec(model="tiny", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16")


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([1, 2, 3], "1-D integer"),
        ([[1, 2, 3]], "1-D integer"),
        (torch.ones(1, 4, dtype=torch.long), "1-D integer"),
        (torch.ones(4), "1-D integer"),
        (torch.tensor([1, 10**6]), "ids go from 0 to"),
        (torch.tensor([-1, 1]), "ids go from 0 to"),
        (torch.zeros(0, dtype=torch.long), "at least 1 tokens"),
    ],
)
def test_prompts_are_token_ids_of_the_model(prompts: Any, words: str) -> None:
    with blended(model(), config({"executor": "none"})) as it:
        with pytest.raises(ValueError, match=f"prompts: .*{words}"):
            it.prefill(prompts)
        if isinstance(prompts, torch.Tensor) and prompts.numel():
            with pytest.raises(ValueError, match=f"tokens: .*{words}"):
                it.remember(prompts)


@pytest.mark.parametrize("ratio", [2.0, -0.1, float("nan"), True, "0.2", None])
def test_a_share_is_a_share_under_the_old_name_too(ratio: Any) -> None:
    with pytest.raises(ValueError, match=r"^recompute_ratio: .*from 0 to 1$"):
        CacheBlendImpl(ratio)


@pytest.mark.parametrize(
    ("block", "path"),
    [
        ({"recompute_ratio": True}, "blend.recompute_ratio"),
        ({"recompute_ratio": "0.2"}, "blend.recompute_ratio"),
        ({"gradual": float("inf")}, "blend.gradual"),
        ({"retriever": {"type": "separator", "separator": []}}, "blend.retriever.separator"),
        ({"retriever": {"type": "separator", "separator": -1}}, "blend.retriever.separator"),
        ({"retriever": {"type": "separator", "separator": True}}, "blend.retriever.separator"),
    ],
)
def test_settings_that_mean_nothing(block: dict[str, Any], path: str) -> None:
    base = {"executor": "cacheblend", "retriever": {"type": "separator", "separator": SEPARATOR}}
    with pytest.raises(ConfigError) as error:
        Engine.open({"connector": "plain", "tiers": ["memory"], "blend": {**base, **block}}, SPEC)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_blending_without_a_separator_says_what_to_name() -> None:
    config = EngineConfig.from_defaults(enable_blending=True, chunk_size=16)
    with pytest.raises(ConfigError, match=r"^blend\.retriever\.separator: name the token id .* such as \[\d+\]$"):
        Engine.open(config, SPEC)


def test_boundaries_are_for_retrievers_that_take_them() -> None:
    prompt = joined(text(1), text(2), text(9, 12))
    with blended(model(), config({"executor": "none"})) as it, pytest.raises(ValueError, match="`explicit` takes them"):
        it.prefill(prompt, boundaries=[[40]])


def test_two_documents_are_not_one_passage() -> None:
    with blended(model(), config({"executor": "none"})) as it:
        with pytest.raises(ValueError, match="hold the separator"):
            it.remember(joined(text(1), text(2)))
        assert it.remember(text(1)) == len(text(1))


def test_a_mask_may_have_the_shape_of_the_prompt() -> None:
    prompt = joined(text(1), text(9, 12))
    with blended(model(), config({"executor": "full"})) as it:
        given = [it.generate(prompt, attention_mask=mask, max_new_tokens=4) for mask in (torch.ones_like(prompt), None)]
    assert torch.equal(*given)


def test_a_model_without_weights() -> None:
    with pytest.raises(ValueError, match=r"^model: has no weights"):
        blended(copy.deepcopy(model()).to("meta"), config({"executor": "none"}))


@pytest.mark.parametrize("dim", [1, -1, 7])
@pytest.mark.parametrize("hidden", [8, 6])  # with 6, the other dimension is as long as there are tokens
def test_tokens_are_along_the_dimension_that_is_named(dim: int, hidden: int) -> None:
    for cls in EXECUTORS:
        if cls.type not in ("none", "epic", "cacheblend"):
            continue
        session = cls(cls.Config(), SPEC).begin(
            BlendRequest(torch.zeros(6, dtype=torch.long), torch.tensor([0, 6]), torch.ones(6, dtype=torch.bool))
        )
        kv, q, places, everyone = torch.zeros(6, hidden), torch.zeros(6, 16), torch.arange(6), torch.ones(6) > 0
        with pytest.raises(ValueError, match=rf"^token_dim: {dim} "):
            session.blend(0, kv, kv, everyone, places, q, kv, kv, places, torch.tensor([0, 6]), dim)


class Broken(NoneExecutor):
    type = "broken"

    def begin(self, request: BlendRequest) -> Any:
        raise ZeroDivisionError("mine")


def test_who_chose_is_named_when_a_third_partys_executor_fails() -> None:
    with blended(model(), config({"executor": "none"})) as it:
        it.remember(text(1))
        it.executor = Broken(Broken.Config(), it.engine.spec)
        with pytest.raises(ZeroDivisionError, match="mine") as error:
            it.prefill(joined(text(1), text(9, 12)))
    assert any("executor 'broken'" in note for note in error.value.__notes__)


def test_verify_wants_an_executor_with_a_budget() -> None:
    said = CliRunner().invoke(
        app(), ["blend", "verify", "--model", "evals/pylm/weights", "--executor", "none", "--dtype", "float32"]
    )
    assert isinstance(said.exception, ConfigError) and "no recompute_ratio" in str(said.exception)
