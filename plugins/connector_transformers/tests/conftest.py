"""Tiny seeded models of many families; every test makes its own or leaves them as they were."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "phi": {},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "gpt_neox": {},
    "bloom": {"n_layer": 3, "n_head": 4},
    "falcon": {"alibi": False},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
        "v_head_dim": 6, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are slower on several threads, and much slower where something else runs beside them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=sorted(_FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make() -> Callable[..., PreTrainedModel]:
    """`make("llama", dtype=..., seed=..., any_config_field=...)`: a fresh copy of a tiny model."""
    import transformers  # here: the process that shares tests out among others loads this file, and makes no model

    transformers.logging.set_verbosity_error()

    def make(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> PreTrainedModel:
        torch.manual_seed(seed)
        fields = _SMALL | _FAMILIES.get(family, {}) | settings
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **fields))
        return model.to(dtype).eval()

    return make


@pytest.fixture
def llama(make: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return make("llama")


@pytest.fixture
def config() -> dict[str, Any]:
    """An engine in memory, with chunks small enough for tiny prompts."""
    return {"connector": "transformers", "chunk_tokens": 16, "tiers": [{"type": "memory", "capacity": "32MiB"}]}


@pytest.fixture
def prompt() -> torch.Tensor:
    """`[1, 75]`: four chunks of 16 tokens, and a tail."""
    return torch.randint(3, 128, (1, 75), generator=torch.Generator().manual_seed(7))
