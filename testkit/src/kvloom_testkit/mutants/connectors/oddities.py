"""Connectors that are odd and right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvloom import Chunk, GPUConnector, KVSpec, MemoryFormat, Segment
from kvloom_testkit.connectors.harnesses import PAGE_TOKENS
from kvloom_testkit.mutants import Oddity
from kvloom_testkit.mutants.connectors.calls import LazyFence
from kvloom_testkit.reference.connector import SlotsConnector

Where = Mapping[str, Any]


class CopiesWhenWaitedFor(Oddity, SlotsConnector):
    """Nothing happens until the fence is asked."""

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> Any:
        return LazyFence(lambda: SlotsConnector.read(self, segments, chunks, **where))

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> Any:
        return LazyFence(lambda: SlotsConnector.write(self, segments, chunks, **where))


class MovesPages(Oddity, GPUConnector):
    """where: `pages`, a tensor `[pages, elements]`; `table`, 1-D int64: the pages of the request."""

    type = "kit_pages"
    format = MemoryFormat.KV_PAGES

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        assert self.spec is not None
        return (-(-num_tokens // PAGE_TOKENS), _page_size(self.spec))

    def check(self, where: Where, num_tokens: int) -> None:
        assert self.spec is not None
        pages, table = where.get("pages"), where.get("table")
        if not (isinstance(pages, torch.Tensor) and isinstance(table, torch.Tensor) and len(where) == 2):
            raise ValueError(f"expected pages= and table=, got {sorted(where)}")
        if pages.dtype != self.spec.torch_dtype or pages.shape[1:] != (_page_size(self.spec),):
            raise ValueError("pages: not of this model")
        if table.dtype != torch.int64 or table.dim() != 1 or len(table) * PAGE_TOKENS < num_tokens:
            raise ValueError("table: no pages of so many tokens")
        needed = table[: -(-num_tokens // PAGE_TOKENS)]  # the rest is filled up with -1
        if needed.numel() and not 0 <= int(needed.min()) <= int(needed.max()) < len(pages):
            raise ValueError("table: pages that there are not")

    @torch.inference_mode()
    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            chunk.tensor.copy_(where["pages"][self._pages(segment, where)])

    @torch.inference_mode()
    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            where["pages"][self._pages(segment, where)] = chunk.tensor

    def _pages(self, segment: Segment, where: Where) -> torch.Tensor:
        pages: torch.Tensor = where["table"][segment.start // PAGE_TOKENS : segment.end // PAGE_TOKENS]
        return pages


def _page_size(spec: KVSpec) -> int:
    return spec.kv_planes * spec.num_layers * PAGE_TOKENS * spec.hidden_dim


class KeepsATableUntilItIsWrittenTo(Oddity, SlotsConnector):
    """And holds on to the tensor, so that no other one takes its place."""

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        slots = where["slots"]
        if not slots.is_inference():  # those have no version
            slots = self.__dict__.setdefault("_tables", {}).setdefault((slots, slots._version), slots.clone())
        super().read(segments, chunks, pool=where["pool"], slots=slots)
