"""A small random Llama with a tokenizer of its own, and a LoRA adapter for it: nothing is downloaded."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def make(folder: Path, *, layers: int = 4, hidden: int = 256, maximum: int = 4096, dtype: str = "float32") -> None:
    """Write the model to `folder`, unless it is there; several processes may ask at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "done").exists():
            return
        _make(folder, layers=layers, hidden=hidden, maximum=maximum, dtype=dtype)
        (folder / "done").touch()


def _make(folder: Path, *, layers: int, hidden: int, maximum: int, dtype: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(
        ["keys and values of tokens, kept in blocks, found again by their hashes " * 20], trainer
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=2, head_dim=32, max_position_embeddings=maximum,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=False,
        initializer_range=0.2,  # large, so that predictions are far from ties
    )  # fmt: skip
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)


def make_hybrid(folder: Path, *, tokenizer: Path, window: int = 256) -> None:
    """A random Gemma 3 whose layers attend, in turn, to a window and to everything; with the tokenizer of another."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    def made() -> Any:
        kinds = ["sliding_attention", "full_attention"] * 2
        config = Gemma3TextConfig(**_SHAPE, sliding_window=window, layer_types=kinds, query_pre_attn_scalar=32)
        model = Gemma3ForCausalLM(config)
        with torch.no_grad():  # they are the last layer, too: larger ones have it say its last token, whatever the KV
            model.model.embed_tokens.weight.mul_(0.1)
        return model

    _make_once(folder, tokenizer, made)


def make_gemma3(folder: Path, *, tokenizer: Path) -> None:
    """A random model of the shape of Gemma 3 270M, but for its vocabulary: windows of 512 in five layers of six."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    def made() -> Any:
        kinds = [*["sliding_attention"] * 5, "full_attention"] * 3
        shape = {
            **_SHAPE, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768, "initializer_range": 0.05,
        }  # fmt: skip
        config = Gemma3TextConfig(**shape, sliding_window=512, layer_types=kinds, query_pre_attn_scalar=256)
        return Gemma3ForCausalLM(config)

    _make_once(folder, tokenizer, made)


def make_windowed(folder: Path, *, tokenizer: Path, window: int = 256) -> None:
    """A random Mistral whose layers all attend to a window; with the tokenizer of another model."""
    from transformers import MistralConfig, MistralForCausalLM

    _make_once(folder, tokenizer, lambda: MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=window)))


def make_kind(kind: str, folder: Path, *, tokenizer: Path) -> None:
    """A random model of one of `KINDS`; with the tokenizer of another."""
    _make_once(folder, tokenizer, KINDS[kind])


def _convolutions() -> Any:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    wide = {"conv_dim": 256, "conv_dim_out": 256, "block_dim": 256, "block_ff_dim": 512, "block_multiple_of": 256}
    config = Lfm2Config(
        **_SHAPE, **wide, layer_types=["conv", "full_attention"] * 2, conv_L_cache=3, block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
    )  # fmt: skip
    return Lfm2ForCausalLM(config)


def _mamba2() -> Any:
    from transformers import FalconH1Config, FalconH1ForCausalLM

    few = {**_SHAPE, "num_hidden_layers": 2}
    config = FalconH1Config(
        **few, mamba_d_ssm=256, mamba_n_heads=8, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=32
    )
    return FalconH1ForCausalLM(config)


def _mamba2_alone() -> Any:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=512, hidden_size=128, num_hidden_layers=2, num_heads=8, head_dim=32, n_groups=1, state_size=32,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    return Mamba2ForCausalLM(config)


def _delta_nets() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 1, "mlp_only_layers": [0, 1, 2], "moe_intermediate_size": 128}
    shape = {**_SHAPE, "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.1}
    config = Qwen3NextConfig(
        **shape, **experts, shared_expert_intermediate_size=128, linear_num_key_heads=1, linear_num_value_heads=1,
        linear_key_head_dim=128, linear_value_head_dim=128, layer_types=["linear_attention"] * 3 + ["full_attention"],
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def _local() -> Any:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    dense = {"moe_layers": [], "interleave_moe_layer_step": 8, "num_local_experts": 1, "num_experts_per_tok": 1}
    config = Llama4TextConfig(
        **_SHAPE, **dense, intermediate_size_mlp=512, attention_chunk_size=256, no_rope_layers=[1, 0, 1, 0]
    )
    return Llama4ForCausalLM(config)


def _latents() -> Any:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    shape = {**_SHAPE, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 2}
    config = DeepseekV2Config(**shape, **latent, q_lora_rank=None, first_k_dense_replace=2)  # without experts
    return DeepseekV2ForCausalLM(config)


KINDS = {
    "convolutions": _convolutions, "mamba2": _mamba2, "mamba2_alone": _mamba2_alone, "delta_nets": _delta_nets,
    "local": _local, "latents": _latents,
}  # fmt: skip
"""LFM2, Falcon H1, Mamba 2, Qwen3-Next, Llama 4 and DeepSeek-V2."""

_SHAPE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip


def _make_once(folder: Path, tokenizer: Path, made: Callable[[], Any]) -> None:
    from transformers import AutoTokenizer

    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "done").exists():
            return
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
        torch.manual_seed(0)
        made().save_pretrained(folder)
        (folder / "done").touch()


def make_adapter(model: Path, folder: Path, *, seed: int) -> None:
    """A LoRA adapter of rank 8 on the attention's projections, with random weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    base = LlamaForCausalLM.from_pretrained(model)
    lora = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False))
    lora.save_pretrained(folder)
