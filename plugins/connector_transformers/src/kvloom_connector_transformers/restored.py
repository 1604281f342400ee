"""Buffers for stored KV before transformers sees it: of the right size from the start, then a cache.

A `DynamicCache` grows by concatenation, so that filling it piece by piece copies everything again with each piece. A
`RestoredKV` is allocated once, for as many tokens as `lookup` forecasts, and becomes a `DynamicCache` without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvloom import KVSpec

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedConfig, StaticCache


@dataclass(slots=True)
class RestoredKV:
    """K and V of rows of equal length: `keys[layer]` and `values[layer]` are `[rows, kv_heads, tokens, size]`.

    Pass it as `cache=` to `Engine.retrieve`, then call `install`.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    lossy: set[str] = field(default_factory=set)
    """Fidelities other than exact among the written chunks: KV computed on top of them is not exact."""

    @classmethod
    def allocate(
        cls, spec: KVSpec, num_tokens: int, *, rows: int = 1, devices: Sequence[torch.device | str] = ("cpu",),
        key_size: int = 0,
    ) -> RestoredKV:  # fmt: skip
        """Uninitialised buffers. devices: of each layer, or one for all. key_size: elements of a head of K, where V has
        another number; the spec has one plane then. Raises ValueError for what does not fit the spec."""
        sizes = (spec.head_size, spec.head_size) if spec.kv_planes == 2 else (key_size, spec.head_size - key_size)
        if min(sizes) < 1:
            raise ValueError(f"key_size: {key_size} of the {spec.head_size} elements of a head of K and V")
        places = list(devices) * spec.num_layers if len(devices) == 1 else list(devices)
        if len(places) != spec.num_layers:
            raise ValueError(f"devices: {len(places)} for {spec.num_layers} layers")
        keys, values = (
            [
                torch.empty((rows, spec.num_kv_heads, num_tokens, size), dtype=spec.torch_dtype, device=place)
                for place in places
            ]
            for size in sizes
        )
        return cls(keys, values)

    @property
    def num_tokens(self) -> int:
        return self.keys[0].shape[2]

    def install(self, config: PreTrainedConfig, num_tokens: int) -> DynamicCache:
        """The first `num_tokens` tokens as the cache of a model with this config: views, nothing is copied.

        `num_tokens` is what every row's `retrieve` confirmed; the rest of the buffers was never written.
        """
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"num_tokens: {num_tokens} of the {self.num_tokens} that were allocated")
        cache = empty_cache(config)
        if num_tokens == 0:
            return cache
        for layer, keys, values in zip(cache.layers, self.keys, self.values, strict=True):
            windowed = type(layer) is DynamicSlidingWindowLayer
            assert windowed or type(layer) is DynamicLayer, f"{type(layer).__name__} is refused when the engine opens"
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys[:, :, :num_tokens], values[:, :, :num_tokens]
            if windowed:
                layer.cumulative_length = num_tokens
        return cache


def empty_cache(config: PreTrainedConfig) -> DynamicCache:
    """A cache for a model with this config whose layers with a window keep the KV of every token.

    Such layers attend to their window alone, with the same bits, but can be stored at the end of any chunk.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    if hasattr(cache, "activate_past_recording"):  # in releases without it, models with windows are refused
        cache.activate_past_recording()
    return cache


def set_length(cache: StaticCache, num_tokens: int) -> None:
    """Tell a StaticCache that its first `num_tokens` tokens are there, in place: compiled graphs keep their addresses.

    `TransformersConnector.write` does this up to the last token that it writes. Call it when fewer count: when another
    row of the batch has fewer.
    """
    from transformers.cache_utils import StaticLayer

    for layer in cache.layers:
        assert type(layer) is StaticLayer, f"{type(layer).__name__} is refused when the engine opens"
        layer.cumulative_length.fill_(num_tokens)
