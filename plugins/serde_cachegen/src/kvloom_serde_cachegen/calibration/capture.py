"""Queries, keys and values of a transformers model, as its attention sees them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

_NAME = "kvloom_calibration"

See = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Gets the number of a layer and its q `[heads, tokens, head_size]`, k and v `[kv_heads, tokens, head_size]`, after
RoPE."""


@contextmanager
def seen_by(see: See, model: PreTrainedModel) -> Iterator[None]:
    """While in it, `see` is shown what every layer attends with. Prompts of one row, without a cache.

    ValueError if the attention of this architecture cannot be looked at; in the run, if K and V differ in shape.
    """
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    masks = AttentionMaskInterface()

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if key.shape != value.shape:
            raise ValueError(
                f"layer {module.layer_idx}: K is {list(key.shape[1:])}, V {list(value.shape[1:])} (heads, tokens, head "
                "size): there is no profile for MLA and the like; the mode step does without"
            )
        see(module.layer_idx, query[0], key[0], value[0])
        return _original(before, module)(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, masks[before])
    model.set_attn_implementation(_NAME)
    try:
        if config._attn_implementation != _NAME:
            raise ValueError(f"{type(model).__name__} has attention of its own, which cannot be looked at")
        yield
    finally:
        model.set_attn_implementation(before)


def _original(name: str, module: Any) -> Callable[..., Any]:
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found: Callable[..., Any] = AttentionInterface().get_interface(name, eager)
    return found


@torch.inference_mode()
def run(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """One prompt `[tokens]` through all layers; what comes of it is of no interest."""
    model.base_model(input_ids=tokens[None].to(model.device), use_cache=False)
