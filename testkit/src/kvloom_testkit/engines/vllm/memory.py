"""The KV memory of an engine by block, as bits, whatever the type of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

POISON = 0x44404440
"""Bits of blocks that are about to be loaded: a finite number in every float type, and of no real K, V or state."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a list of blocks. The groups of an engine overlay each other, and own blocks in turn."""

    block: int
    """Tokens of a block."""
    layers: Sequence[torch.Tensor]
    """For each layer its memory as int32, blocks first."""

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks with what no load writes."""
        for layer in self.layers:
            layer[list(blocks)] = POISON

    def is_poisoned(self, block: int, slots: int) -> bool:
        """Return whether some layer of a block has what `poison` wrote in more than what lies behind `slots` tokens.

        Where in the block a token is differs between kernels; each has as much of it.
        """
        behind = self.block - slots
        return any(
            int((layer[block] == POISON).sum()) * self.block > behind * layer[block].numel() for layer in self.layers
        )


def bits(layer: torch.Tensor) -> torch.Tensor:
    """A layer's memory as int32, `[blocks, ...]`: NaN is not equal to itself, and states have types of their own."""
    return layer.view(torch.int32)


def groups_of(config: Any, caches: Sequence[torch.Tensor]) -> list[Group]:
    """The groups of an engine.

    config: its KVCacheConfig. caches: the memory of each layer, in the order of layers; empty if it is in other
    processes, and then the groups' layers are, too.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    names = [name for group in config.kv_cache_groups for name in group.layer_names] if caches else []
    memory = dict(zip(sorted(names, key=extract_layer_index), map(bits, caches), strict=True))
    return [
        Group(group.kv_cache_spec.block_size, [memory[name] for name in group.layer_names if name in memory])
        for group in config.kv_cache_groups
    ]
