"""The wire format of vLLM's KV events: `vllm/distributed/kv_events.py` of vLLM 0.32 decodes these.

A message has three frames: topic, sequence number (8 bytes, big-endian), batch (msgpack). The batch is an array, its
events are maps with a `type`, and fields with their default None are left out.
"""

from __future__ import annotations

from typing import Any

import msgspec

Hash = int | bytes
END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(_Event):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    """Keys that distinguish equal tokens, one entry for each block."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    """The tier's name."""


class BlockRemoved(_Event):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(_Event):
    pass


AnyEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    """Seconds since the epoch."""
    events: list[AnyEvent]
    data_parallel_rank: int | None = None


def sequence(number: int) -> bytes:
    """A sequence number as a frame."""
    return number.to_bytes(8, "big")
