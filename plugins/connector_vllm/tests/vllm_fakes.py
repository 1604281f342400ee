"""Support for the tests without vLLM: requests, an engine's block manager and its memory, and configurations."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

BLOCK = 4
"""Tokens of a block."""


@dataclass
class FakeRequest:
    """A request as vLLM keeps it: its hashes grow with its tokens."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.tokens)
        self.rehash()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    def append(self, *tokens: int) -> None:
        self.tokens.extend(tokens)
        self.rehash()

    def continued(self, computed: int, *tokens: int) -> None:
        """The next input of a session: the answer's last token, which nothing was computed with, goes, and the rest is
        part of the prompt."""
        del self.tokens[computed:], self.block_hashes[computed // BLOCK :]
        self.append(*tokens)
        self.num_prompt_tokens = len(self.tokens)

    def rehash(self) -> None:
        while (len(self.block_hashes) + 1) * BLOCK <= len(self.tokens):
            start = len(self.block_hashes) * BLOCK
            parent = self.block_hashes[-1] if self.block_hashes else repr(self.cache_salt).encode()
            text = parent + repr(self.tokens[start : start + BLOCK]).encode()
            self.block_hashes.append(hashlib.sha256(text).digest())


class FullAttentionSpec(SimpleNamespace):
    """By its name it is vLLM's."""


class SlidingWindowSpec(SimpleNamespace):
    """The same."""


class MambaSpec(SimpleNamespace):
    """The same."""


def state_spec(**changes: Any) -> MambaSpec:
    """States of 3 x 5 and 4 x 2 elements, in a page of the size of attention's."""
    fields: dict[str, Any] = {
        "block_size": BLOCK, "shapes": ((3, 5), (4, 2)), "dtypes": (torch.bfloat16, torch.float32),
        "real_page_size_bytes": 30 + 32, "page_size_bytes": 2 * BLOCK * 16 * 4, "mamba_type": "MAMBA2", "num_heads": 1,
        "mamba_cache_mode": "align", "num_speculative_blocks": 0,
    }  # fmt: skip
    return MambaSpec(**{**fields, **changes})


def layer_spec(**changes: Any) -> FullAttentionSpec:
    fields: dict[str, Any] = {
        "block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32, "sliding_window": None,
        "page_size_bytes": 2 * BLOCK * 16 * 4, "kv_quant_mode": SimpleNamespace(name="NONE"),
    }  # fmt: skip
    return FullAttentionSpec(**{**fields, **changes})


def kv_cache_config(layers: int = 3, spec: Any = None, **changes: Any) -> SimpleNamespace:
    names = [f"model.layers.{number}.self_attn.attn" for number in range(layers)]
    group = SimpleNamespace(layer_names=names, kv_cache_spec=spec or layer_spec(), is_eagle_group=False)
    fields = {"kv_cache_groups": [group], "kv_cache_layout": "LBHNC", "hash_block_size": None, "num_blocks": 16}
    return SimpleNamespace(**{**fields, **changes})


def grouped(*specs: Any) -> Any:
    """Each group has two layers of its own."""
    whole = kv_cache_config()
    names = iter(range(100))
    whole.kv_cache_groups = [
        SimpleNamespace(
            layer_names=[f"layers.{next(names)}" for _ in range(2)], kv_cache_spec=spec, is_eagle_group=False
        )
        for spec in specs
    ]  # fmt: skip
    return whole


def vllm_config(model: str = "tiny", *, kv_heads: int = 4, **parallel: int) -> SimpleNamespace:
    """kv_heads: of all ranks."""
    sizes = {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model, revision=None, dtype=torch.float32, seed=0, quantization=None,
            hf_config=SimpleNamespace(to_dict=lambda: {"layers": 3}), hf_text_config=None,
            get_total_num_kv_heads=lambda: kv_heads,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        device_config=SimpleNamespace(device_type="cpu"),
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(**{**sizes, **parallel}),
    )  # fmt: skip
