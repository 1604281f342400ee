"""Announcements as vLLM's own events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from ..scheduling.announcing import Announcement


def events_of(announcements: Iterable[Announcement], block_tokens: int) -> Iterator[Any]:
    for one in announcements:
        if one.blocks is None:
            yield AllBlocksCleared()
            continue
        hashes = [maybe_convert_block_hash(each) for each in one.blocks.hashes]
        if one.what == "removed":
            yield BlockRemoved(block_hashes=hashes, medium=one.medium, group_idx=0)
            continue
        parent, adapter = one.blocks.parent, one.blocks.adapter
        yield BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=list(one.blocks.tokens),
            block_size=block_tokens,
            lora_id=None if adapter is None else adapter.adapter_id,
            lora_name=None if adapter is None else adapter.name,
            medium=one.medium,
            group_idx=0,
        )
