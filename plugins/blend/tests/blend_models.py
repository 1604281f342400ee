"""Small models of random weights, one of each shape; texts, and what is known of a prompt."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from kvloom_blend import BlendedModel
from kvloom_blend.retrievers import PassageRetriever
from kvloom_blend.retrievers.load_task import LoadTask

# The models are so small that threads only wait for each other, and where tests run side by side they wait long.
torch.set_num_threads(1)

VOCABULARY = 500
SEPARATOR = 5
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**_SMALL),
    "mistral": MistralConfig(**_SMALL, sliding_window=None),
    "qwen2": Qwen2Config(**_SMALL),
    "qwen3": Qwen3Config(**_SMALL, head_dim=32),
    "gemma": GemmaConfig(**_SMALL, head_dim=16),
    "phi3": Phi3Config(**_SMALL),
}


@lru_cache
def model(name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype).eval()


def text(seed: int, length: int = 40) -> torch.Tensor:
    """Tokens, none of them the separator."""
    return torch.randint(10, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def joined(*texts: torch.Tensor) -> torch.Tensor:
    """Texts with the separator between them."""
    parts = [part for one in texts for part in (one, torch.tensor([SEPARATOR]))]
    return torch.cat(parts[:-1])


def whole(of: Any, prompt: torch.Tensor, keep: int = 1) -> torch.Tensor:
    """Logits of the last `keep` tokens by the model alone: float32 `[keep, vocabulary]`."""
    with torch.inference_mode():
        logits: torch.Tensor = of(prompt[None], logits_to_keep=keep).logits[0].float()
    return logits


def config(executor: dict[str, Any], retriever: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "connector": "transformers",
        "chunk_tokens": 16,
        "tiers": [{"type": "memory", "capacity": "64MiB"}],
        "blend": {
            **executor,
            "retriever": retriever or {"type": "separator", "separator": SEPARATOR},
            "min_tokens": 0,
        },
        **more,
    }


TEXTS = [text(seed) for seed in range(4)]
QUESTION = text(9, 12)
PROMPT = joined(*TEXTS, QUESTION)
ALL = {"executor": "full"}
NONE = {"executor": "none"}
DISK = {"type": "disk", "capacity": "1GiB"}


def valid(it: BlendedModel, prompt: torch.Tensor, **more: Any) -> torch.Tensor:
    assert isinstance(it.retriever, PassageRetriever)
    task = it.retriever.new_request(prompt, torch.tensor([0, len(prompt)]), **more)
    mask = task.result(0).valid_mask
    assert isinstance(task, LoadTask)
    task.close()
    return mask
