"""Models whose KV can't be restored exactly are refused when they are opened, by layer and by kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache, PreTrainedModel

from kvloom_connector_transformers import cached, spec_of
from kvloom_connector_transformers.plain import plain_kv

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_hidden_layers": 6,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
}
QWEN3_NEXT = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
GEMMA3N = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "head_dim": 8,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
    "layer_types": ["full_attention"] * 6,
    "activation_sparsity_pattern": [0.0] * 6,
    "laurel_rank": 4,
}


@pytest.mark.parametrize(
    ("family", "settings", "problem"),
    [
        ("gemma3n_text", GEMMA3N, "layers 3-5: .*KV"),
        ("falcon_mamba", {"state_size": 4}, "layers 0-2: "),
        ("qwen3_next", QWEN3_NEXT, "layers 0-2: .*linear"),
        ("gemma4_text", GEMMA4, "layer 5: K and V are"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "layers 0, 2: .*conv"),
        ("rwkv", {"attention_hidden_size": 32}, "layers 0-2: nothing in a DynamicCache"),
        ("llama", {"rope_parameters": LONGROPE}, "rope type 'longrope'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope type 'dynamic'",
        ),
    ],
)
def test_refused_models(
    make: Callable[..., PreTrainedModel], config: dict[str, Any], family: str, settings: dict[str, Any], problem: str
) -> None:
    model = make(family, **settings)
    with pytest.raises(ValueError, match=problem) as refusal:
        cached(model, config)
    assert str(refusal.value).startswith(f"{type(model).__name__}: its KV cannot be stored and restored exactly")


def test_encoder_decoders_are_refused() -> None:
    fields = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64, "vocab_size": 128}
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **fields)).eval()
    with pytest.raises(ValueError, match="encoder-decoder"):
        spec_of(model)


def test_bidirectional_attention_is_refused(make: Callable[..., PreTrainedModel]) -> None:
    with pytest.raises(ValueError, match="bidirectional"):
        spec_of(make("gemma", head_dim=8, use_bidirectional_attention=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_encoders_are_refused_and_their_decoders_are_not(
    make: Callable[..., PreTrainedModel], config: dict[str, Any], family: str, dtype: torch.dtype
) -> None:
    with pytest.raises(
        ValueError, match=r"layers 1-2: the KV of a token depends on later tokens \(config.is_decoder is False"
    ):
        cached(make(family, dtype=dtype, is_decoder=False, pad_token_id=0), config)
    spec_of(make(family, dtype=dtype, is_decoder=True, pad_token_id=0))


def test_attention_that_no_config_field_calls_bidirectional_is_refused(llama: PreTrainedModel) -> None:
    for layer in llama.model.layers[1:]:
        attend = layer.self_attn.forward
        layer.self_attn.is_causal = False
        layer.self_attn.forward = lambda *args, attend=attend, **kwargs: attend(
            *args, **kwargs | {"attention_mask": torch.zeros(1, 1, 4, 4)}
        )
    with pytest.raises(ValueError, match="layer 2: the KV of a token depends on later tokens"):
        spec_of(llama)


def test_a_leak_as_small_as_rounding_is_refused_on_the_cpu(llama: PreTrainedModel) -> None:
    def leak(module: torch.nn.Module, inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + 1e-6 * hidden[:, -1:]

    llama.model.embed_tokens.register_forward_hook(leak)
    with pytest.raises(ValueError, match="layers 0-2: the KV of a token depends on later tokens"):
        spec_of(llama)


def test_a_leak_is_told_from_rounding_where_experts_are_shared(make: Callable[..., PreTrainedModel]) -> None:
    fields = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "num_hidden_layers": 12}
    model = make("qwen3_moe", head_dim=8, **fields)
    spec_of(model)
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, hidden: hidden + 0.01 * hidden[:, -1:])
    with pytest.raises(ValueError, match="layers 0-11: the KV of a token depends on later tokens"):
        spec_of(model)


def test_tokens_that_cannot_be_told_apart_are_refused(llama: PreTrainedModel) -> None:
    with torch.no_grad():
        llama.model.embed_tokens.weight.zero_()
    with pytest.raises(ValueError, match="different tokens have the same KV"):
        spec_of(llama)


def test_looking_leaves_the_model_as_it_was(make: Callable[..., PreTrainedModel]) -> None:
    model = make("gpt2", attn_pdrop=0.5, embd_pdrop=0.5, resid_pdrop=0.5)
    expected = spec_of(model)
    model.transformer.h[0].train()
    modes = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    assert spec_of(model) == expected
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_positions_that_outlive_a_call_are_refused(llama: PreTrainedModel) -> None:
    llama.model.rope_deltas = None
    with pytest.raises(ValueError, match="rope_deltas"):
        spec_of(llama)


def test_tensor_parallel_models_are_refused(llama: PreTrainedModel) -> None:
    llama._tp_size = 2
    with pytest.raises(ValueError, match="split over 2 devices"):
        spec_of(llama)


def test_offloaded_weights_are_refused(llama: PreTrainedModel) -> None:
    llama.lm_head.weight = torch.nn.Parameter(llama.lm_head.weight.to("meta"), requires_grad=False)
    llama.lm_head.forward = lambda x: x
    with pytest.raises(ValueError, match=r"lm_head\.weight: its weights are offloaded"):
        spec_of(llama)


def test_anything_but_a_transformers_model_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="expected a transformers model, got Linear"):
        spec_of(torch.nn.Linear(2, 2))


def test_plain_families_are_described(make: Callable[..., PreTrainedModel], family: str) -> None:
    model = make(family)
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([[5, 6]]), past_key_values=cache, use_cache=True)
    seen = plain_kv(model)
    assert seen.num_layers == len(cache.layers) == 3
    for layer in cache.layers:
        assert (1, seen.num_kv_heads, 2, seen.key_size) == tuple(layer.keys.shape)
        assert (1, seen.num_kv_heads, 2, seen.value_size) == tuple(layer.values.shape)
        assert seen.dtype == layer.keys.dtype == layer.values.dtype
    assert seen.devices == (torch.device("cpu"),) * 3
