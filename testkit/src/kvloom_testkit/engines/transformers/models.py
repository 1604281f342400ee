"""Tiny random models and adapters, made locally: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from kvloom_testkit.engines.requirements.models import WINDOW

VOCABULARY = 512
HIDDEN, HEADS, KV_HEADS, HEAD, LAYERS = 128, 4, 2, 32, 3
"""32 is the smallest head that vLLM's CPU backend has."""
_RANK = 4


def make(folder: str, *, seed: int, kind: str) -> None:
    """Write a random model without a tokenizer into a folder.

    Its weights are large, so that its predictions are far from ties and change with every token of the prompt.
    kind: `dense`, a Llama; `latents`, a DeepSeek V2, whose KV is one vector for each token and layer; `windows`, a
    Gemma 3, of whose layers all but one see `WINDOW` tokens; `states`, an LFM2, with short convolutions in all but one.
    """
    torch.manual_seed(seed)
    {"dense": _dense, "latents": _latents, "windows": _windows, "states": _states}[kind]().save_pretrained(folder)


_SAME: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": 16_384, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2, "tie_word_embeddings": False, "initializer_range": 0.2,
}  # fmt: skip


def _dense() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SAME, num_key_value_heads=KV_HEADS, head_dim=HEAD))


def _latents() -> Any:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **_SAME, num_key_value_heads=HEADS, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=4, first_k_dense_replace=LAYERS, n_shared_experts=1,
        moe_intermediate_size=HIDDEN, num_experts_per_tok=1, n_group=1, topk_group=1,
    )  # fmt: skip
    return DeepseekV2ForCausalLM(config)


def _windows() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        **_SAME, num_key_value_heads=KV_HEADS, head_dim=HEAD, query_pre_attn_scalar=HEAD, sliding_window=WINDOW,
        layer_types=kinds,
    )  # fmt: skip
    return Gemma3ForCausalLM(config)


def _states() -> Any:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    wide = {"conv_dim": HIDDEN, "conv_dim_out": HIDDEN, "block_dim": HIDDEN, "block_ff_dim": 2 * HIDDEN}
    same = {**_SAME, "initializer_range": 0.1}  # or the products of its gates make much of the last bit
    config = Lfm2Config(
        **same, **wide, num_key_value_heads=KV_HEADS, head_dim=HEAD, layer_types=["conv", "full_attention", "conv"],
        conv_L_cache=3, block_multiple_of=HIDDEN, block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=False,
    )  # fmt: skip
    return Lfm2ForCausalLM(config)


def make_adapter(folder: str, *, seed: int) -> None:
    """Write a random LoRA adapter for such a model, on K and V."""
    from safetensors.torch import save_file

    into = Path(folder)
    into.mkdir(parents=True)
    torch.manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name in ("k_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(_RANK, HIDDEN) * 0.3
            weights[f"{prefix}.lora_B.weight"] = torch.randn(KV_HEADS * HEAD, _RANK) * 0.3
    save_file(weights, into / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": ["k_proj", "v_proj"], "bias": "none",
        "base_model_name_or_path": "tiny", "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (into / "adapter_config.json").write_text(json.dumps(settings))
