"""Finds the place of each element of K and V in a page of vLLM's memory, by having the engine write one, or refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.platforms import current_platform

from ..identity import Identity
from ..paged.views import order_of


def page_order(config: Any, identity: Identity, kv_caches: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """int64 `[page_elements]`: where in a page each element of K and V is, of all parts; `views.order_of` says in which
    order.

    ValueError, saying so, for memory whose order is not known: `connector: vllm` keeps pages of any order.
    """
    spec = identity.spec
    if spec.kv_planes != 2 or spec.kv_quantization:
        raise ValueError("connector: vllm_blob takes K and V that are neither quantised nor latent; write vllm")
    cache = kv_caches[identity.layer_names[0]]
    if current_platform.is_cpu():
        return order_of(lambda keys, values: _written(config, identity, keys, values), identity)
    from vllm.model_executor.layers.attention import Attention

    layer = config.compilation_config.static_forward_context[identity.layer_names[0]]
    assert isinstance(layer, Attention)
    backend = layer.attn_backend.get_name()
    if backend not in ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"):
        raise ValueError(
            f"connector: the order of {backend}'s pages is not known; write vllm, which keeps them as they are"
        )
    return order_of(lambda keys, values: _placed(cache, keys, values), identity)


def _written(config: Any, identity: Identity, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The bytes that vLLM's own CPU operation writes for one block's K and V, `[tokens, heads, size]`."""
    from vllm import _custom_ops as ops

    from .platform import isa_of

    tokens, heads, size = keys.shape
    cache = torch.zeros(1, heads, 2 * tokens, size, dtype=keys.dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    slots = torch.arange(tokens, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(
        keys, values, key_cache, value_cache, slots, isa_of(config, keys.dtype, tokens, size)
    )
    return cache.flatten()


def _placed(cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A block `[heads, tokens, K then V]`, in memory as `cache` is."""
    block = torch.cat([keys, values], dim=-1).transpose(0, 1)
    flat = torch.zeros(block.numel(), dtype=block.dtype)
    torch.as_strided(flat, tuple(block.shape), tuple(cache.stride()[1:])).copy_(block)
    return flat
