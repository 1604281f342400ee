"""Input that does not fit or cannot work, and models that change or are used meanwhile."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from blend_models import NONE, PROMPT, QUESTION, SEPARATOR, TEXTS, config, joined, model, text, whole

from kvloom import ConfigError, Engine
from kvloom_blend import BlendedModel, blended
from kvloom_connector_transformers import spec_of


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"executor": "cachblend"}, "did you mean 'cacheblend'"),
        ({"type": "cacheblend"}, "blend.type: unknown key; did you mean 'executor'"),
        ({"executor": "cacheblend", "recompute_ratio": 1.5}, "blend.recompute_ratio"),
        ({"executor": "cacheblend", "recompute_ratio": -0.1}, "blend.recompute_ratio"),
        ({"executor": "cacheblend", "check_layers": [4]}, "blend.check_layers: names layer 4; the model has 4"),
        ({"executor": "cacheblend", "check_layers": [2, 1]}, "ascending"),
        ({"executor": "cacheblend", "check_layers": []}, "at least one layer"),
        ({"executor": "hybrid", "check_layers": [1, 2]}, "one layer"),
        ({"executor": "none", "recompute_ratio": 0.1}, "recompute_ratio"),
        ({"executor": "none", "retriever": "seperator"}, "did you mean 'separator'"),
        ({"executor": "none", "retriever": "separator"}, "separator"),
        ({"executor": "none", "retriever": {"type": "separator", "separator": 500}}, "the vocabulary has 500"),
        ({"executor": "none", "retriever": {"type": "separator", "separator": []}}, "separator"),
        ({"executor": "none", "retriever": {"type": "separator", "separator": 5, "lead": [501]}}, "501 is not a token"),
        ({"executor": "none", "retriever": {"type": "fixed", "piece_tokens": 8}}, "piece_tokens"),
        ({"executor": "none", "retriever": {"type": "content", "piece_tokens": 8}}, "piece_tokens"),
        ({"executor": "none", "min_tokens": -1}, "min_tokens"),
    ],
)
def test_settings_that_cannot_work(block: dict[str, Any], said: str) -> None:
    plan = config({})
    plan["blend"] = {"retriever": {"type": "separator", "separator": SEPARATOR}, **block}
    with pytest.raises(ConfigError, match=said.replace("'", ".")):
        blended(model(), plan)


def test_a_config_without_blending_and_another_connector() -> None:
    with pytest.raises(ConfigError, match="blend"):
        blended(model(), {"connector": "transformers", "tiers": ["memory"]})
    with pytest.raises(ConfigError, match="connector"):
        blended(model(), {**config(NONE), "connector": "plain"})
    with pytest.raises(ConfigError, match=r"^tiers\.0\.pth: unknown key"):  # before the weights are read
        blended(None, {**config(NONE), "tiers": [{"type": "dict", "pth": "kv"}]})


def test_an_engine_of_another_model_is_refused() -> None:
    with (
        Engine.open(config(NONE), spec_of(model("qwen2"))) as engine,
        pytest.raises(ValueError, match="opened for the KV of another model"),
    ):
        BlendedModel(model("llama"), engine)


@pytest.mark.parametrize("starts", [[0, 20], [1, 32], [0, 40, 32], [0], []], ids=str)
def test_a_query_start_loc_that_does_not_fit(starts: list[int]) -> None:
    with blended(model(), config(NONE)) as it, pytest.raises(ValueError, match="query_start_loc"):
        it.retriever.new_request(text(1, 32), torch.tensor(starts, dtype=torch.long))


def test_boundaries_that_do_not_fit() -> None:
    with blended(model(), config(NONE, {"type": "explicit"})) as it:
        for bounds in ([[30, 20]], [[0, 33]], [[-1]]):
            with pytest.raises(ValueError, match="boundaries"):
                it.prefill(text(1, 32), boundaries=bounds)
        with pytest.raises(ValueError, match="boundaries: of 2 requests"):
            it.prefill(text(1, 32), boundaries=[[1], [2]])


def test_boundaries_say_where_passages_are() -> None:
    with blended(model(), config(NONE, {"type": "explicit"})) as it:
        it.remember(TEXTS[0])
        prompt = torch.cat([TEXTS[1][:7], TEXTS[0], QUESTION])
        assert it.prefill(prompt, boundaries=[[7, 47]], store=False).blended_tokens == 40
        assert it.prefill(prompt, boundaries=[[8, 47]], store=False).blended_tokens == 0


def test_of_several_prompts_the_short_ones_are_computed() -> None:
    plan = config(NONE)
    plan["blend"]["min_tokens"] = 100
    with blended(model(), plan) as it:
        for one in TEXTS:
            it.remember(one)
        short = joined(TEXTS[0], QUESTION)
        both = it.prefill([short, PROMPT], store=False)
        assert both.blended_tokens == 160
        assert torch.allclose(both.logits[0], whole(model(), short), atol=1e-4)


def test_a_model_that_has_changed_takes_and_leaves_nothing() -> None:
    subject = copy.deepcopy(model())
    with blended(subject, config(NONE)) as it:
        for one in TEXTS:
            it.remember(one)
        with torch.no_grad():
            subject.model.layers[0].mlp.down_proj.weight.mul_(1.5)
        blobs = it.engine.health().tiers[0].blobs
        done = it.prefill(PROMPT)
        assert done.exact and "other weights" in done.note
        assert torch.allclose(done.logits[0], whole(subject, PROMPT), atol=1e-4)
        with pytest.raises(ValueError, match="other weights"):
            it.remember(text(50))
        assert it.engine.health().tiers[0].blobs == blobs
        with torch.no_grad():
            subject.model.layers[0].mlp.down_proj.weight.div_(1.5)
        if spec_of(subject) == it.engine.spec:  # rounding may have left its trace
            assert it.prefill(PROMPT, store=False).blended_tokens == 160


def test_the_model_may_be_called_while_it_blends() -> None:
    """By its own `generate`, by another wrapper, by anybody: nobody gets another's rows, mask or cache."""
    subject = model()
    expected = whole(subject, PROMPT)
    first = blended(subject, config({"executor": "hybrid"}))
    second = blended(subject, config({"executor": "cacheblend"}))
    with first, second:
        for it in (first, second):
            for one in TEXTS:
                it.remember(one)
        tokens = [it.generate(PROMPT, max_new_tokens=4, do_sample=False, store=False) for it in (first, second)]
        wrong: list[object] = []

        def generating(number: int) -> None:
            try:
                for _ in range(4):
                    it = (first, second)[number]
                    got = it.generate(PROMPT, max_new_tokens=4, do_sample=False, store=False)
                    if not torch.equal(got, tokens[number]):
                        wrong.append(got)
            except Exception as error:
                wrong.append(error)

        def calling() -> None:
            try:
                wrong.extend(n for n in range(30) if not torch.allclose(whole(subject, PROMPT), expected, atol=1e-5))
            except Exception as error:
                wrong.append(error)

        jobs = [lambda: generating(0), lambda: generating(1), lambda: generating(0), calling]
        threads = [threading.Thread(target=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_a_model_that_cannot_be_run_on_some_tokens_is_refused_when_it_is_opened() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    shape = GptOssConfig(
        vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["full_attention"] * 2, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    torch.manual_seed(0)  # with some weights the choice of experts hangs on rounding, which is refused before
    odd = GptOssForCausalLM(shape).eval()
    with pytest.raises(ValueError, match=r"cannot run on a subset of tokens.*s_aux"):
        blended(odd, config(NONE))


def test_keys_and_values_of_different_sizes_are_refused() -> None:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    shape = DeepseekV2Config(
        vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12,
        first_k_dense_replace=2,
    )  # fmt: skip
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="DeepseekV2ForCausalLM has K and V of different sizes"):
        blended(DeepseekV2ForCausalLM(shape).eval(), config(NONE))


def test_layers_with_a_window_are_refused() -> None:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    shape = Llama4TextConfig(
        vocab_size=500, hidden_size=64, intermediate_size=96, intermediate_size_mlp=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=1, attention_chunk_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="Llama4ForCausalLM has layers with a window"):
        blended(Llama4ForCausalLM(shape).eval(), config(NONE))


@pytest.mark.parametrize("asked", [{"num_beams": 2}, {"num_return_sequences": 3}, {"use_cache": False}], ids=str)
def test_generate_refuses_what_kv_cannot_serve(asked: dict[str, Any]) -> None:
    with blended(model(), config(NONE)) as it, pytest.raises(ValueError, match=next(iter(asked))):
        it.generate(PROMPT, max_new_tokens=2, **asked)


def test_generate_takes_what_tokenizers_give() -> None:
    with blended(model(), config(NONE)) as it:
        output = it.generate(input_ids=PROMPT[None], attention_mask=torch.ones_like(PROMPT[None]), max_new_tokens=2)
        assert output.shape == (1, len(PROMPT) + 2)


def test_short_prompts_are_computed() -> None:
    plan = config(NONE)
    plan["blend"]["min_tokens"] = len(PROMPT) + 1
    with blended(model(), plan) as it:
        it.remember(TEXTS[0])
        done = it.prefill(PROMPT, store=False)
        assert done.blended_tokens == 0 and "min_tokens" in done.note
        assert it.prefill(torch.cat([PROMPT, QUESTION]), store=False).blended_tokens == 40


@pytest.mark.parametrize("prompt", [torch.zeros(0, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)], ids=str)
def test_what_is_no_prompt(prompt: torch.Tensor) -> None:
    with blended(model(), config(NONE)) as it, pytest.raises(ValueError, match="prompts"):
        it.prefill([prompt])
