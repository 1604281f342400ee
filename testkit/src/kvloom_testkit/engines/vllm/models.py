"""Tiny random models and adapters, made locally: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import torch

VOCABULARY = 512
HIDDEN, HEADS, KV_HEADS, HEAD, LAYERS = 128, 4, 2, 32, 3
"""32 is the smallest head that vLLM's CPU backend has."""
_RANK = 4


def make(folder: Path, *, seed: int) -> None:
    """Write a random Llama without a tokenizer into a folder.

    Its weights are large, so that its predictions are far from ties and change with every token of the prompt.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD, max_position_embeddings=16_384,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def make_adapter(folder: Path, *, seed: int) -> None:
    """Write a random LoRA adapter for such a model, on K and V."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name in ("k_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(_RANK, HIDDEN) * 0.3
            weights[f"{prefix}.lora_B.weight"] = torch.randn(KV_HEADS * HEAD, _RANK) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": ["k_proj", "v_proj"], "bias": "none",
        "base_model_name_or_path": "tiny", "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
