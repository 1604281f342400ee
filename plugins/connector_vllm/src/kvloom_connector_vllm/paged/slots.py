"""Places of tokens: slot mappings and block tables, checked before memory is touched by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .table import PageTable

Slots = np.ndarray[tuple[int], np.dtype[np.int64]]
"""The slot of each token, in order; a negative one is skipped."""


def slots_of(where: Mapping[str, Any], num_tokens: int, pages: PageTable) -> Slots:
    """The slots of the first `num_tokens` tokens, below `pages.num_slots`. ValueError that names the argument.

    Entries of a `slot_mapping` may be negative, those of a `block_table` may not. Waits for a tensor on a device.
    """
    mapping, table = where.get("slot_mapping"), where.get("block_table")
    if (mapping is None) == (table is None):
        problem = (
            "missing; pass slot_mapping= or block_table=" if mapping is None else "pass it or block_table, not both"
        )
        raise ValueError(f"slot_mapping: {problem}")
    if mapping is not None:
        if where.get("block_size") is not None:
            raise ValueError("block_size: goes with block_table, not with slot_mapping")
        slots = _entries(mapping, num_tokens, "slot_mapping", "tokens")
        _check_below(slots, pages.num_slots, "slot_mapping", "slots")
        return slots
    return _slots_of_blocks(where, num_tokens, pages)


def _slots_of_blocks(where: Mapping[str, Any], num_tokens: int, pages: PageTable) -> Slots:
    size = where.get("block_size")
    if size is None:
        size = pages.block_size
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % pages.block_size:
        raise ValueError(f"block_size: expected a multiple of {pages.block_size}, as kvcaches have it, got {size!r}")
    blocks = _entries(where["block_table"], -(-num_tokens // size), "block_table", f"blocks of {size} tokens")
    if blocks.size and int(blocks.min()) < 0:
        at = int(blocks.argmin())
        raise ValueError(f"block_table: entry {at} is {blocks[at]}, and there is a token in it")
    _check_below(blocks, pages.num_slots // size, "block_table", "blocks")
    positions = np.arange(num_tokens, dtype=np.int64)
    return blocks[positions // size] * size + positions % size


def _entries(tensor: Any, count: int, name: str, unit: str) -> Slots:
    """The first `count` of a 1-D tensor of whole numbers."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: expected int32 or int64 of one dimension, got {tensor.dtype} {list(tensor.shape)}")
    if tensor.numel() < count:
        raise ValueError(f"{name}: {tensor.numel()} entries, not {count}, one for each of the {unit}")
    return tensor[:count].cpu().to(torch.int64).numpy()


def _check_below(entries: Slots, limit: int, name: str, unit: str) -> None:
    if entries.size and int(entries.max()) >= limit:
        at = int(entries.argmax())
        raise ValueError(f"{name}: entry {at} is {entries[at]}, and kvcaches have {limit} {unit}")
