"""`type: vllm_offload`: what vLLM's own offloading moves as one piece, of all ranks, as opaque bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvloom import Chunk, GPUConnector, KVSpec, MemoryFormat, Segment

from .settings import OffloadPagesConfig


class OffloadPagesConnector(GPUConnector):
    """A chunk is one piece (KV_PAGES), uint8 `[1, bytes of all ranks]`; what segments count is pieces, not tokens.

    `where`: `rows`, for each rank a view uint8 `[slots, piece_bytes]`; `slots`, which of them each segment has, by the
    segment's start.
    """

    type = "vllm_offload"
    format = MemoryFormat.KV_PAGES
    Config = OffloadPagesConfig

    def __init__(self, config: OffloadPagesConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        if config.geometry is None:
            raise ValueError(f"{self.type!r} is opened by vLLM's OffloadingConnector (docs/use/vllm.md)")
        self._geometry = config.geometry

    @property
    def representation(self) -> Mapping[str, Any]:
        return self._geometry.model_dump(mode="json")

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        return (num_tokens, sum(self._geometry.piece_bytes))

    def check(self, where: Mapping[str, Any], num_tokens: int) -> None:
        if set(where) != {"rows", "slots"}:
            raise ValueError(f"vllm_offload connector: expected rows= and slots=, got {sorted(where) or 'nothing'}")
        rows, slots, sizes = where["rows"], where["slots"], self._geometry.piece_bytes
        if not isinstance(rows, list | tuple) or not all(isinstance(row, torch.Tensor) for row in rows):
            raise ValueError("rows: expected a list of tensors, one for each rank")
        if [(row.dtype, row.dim(), row.shape[-1]) for row in rows] != [(torch.uint8, 2, size) for size in sizes]:
            raise ValueError(f"rows: expected uint8 [slots, bytes] of {sizes}, got {[list(row.shape) for row in rows]}")
        if not isinstance(slots, list | tuple) or not all(isinstance(slot, int) for slot in slots):
            raise ValueError("slots: expected a list of numbers")
        count = min(row.shape[0] for row in rows)
        wrong = next((slot for slot in slots if not 0 <= slot < count), None)
        if wrong is not None:
            raise ValueError(f"slots: there is no slot {wrong}; there are {count}")
        if num_tokens > len(slots):
            raise ValueError(f"slots: {len(slots)} for {num_tokens} pieces")

    @torch.inference_mode()
    def read(
        self, segments: Sequence[Segment], chunks: Sequence[Chunk], *, rows: Sequence[torch.Tensor],
        slots: Sequence[int],
    ) -> None:  # fmt: skip
        for segment, chunk in zip(segments, chunks, strict=True):
            for place, piece in zip(slots[segment.start : segment.end], chunk.tensor, strict=True):
                torch.cat([row[place] for row in rows], out=piece)

    @torch.inference_mode()
    def write(
        self, segments: Sequence[Segment], chunks: Sequence[Chunk], *, rows: Sequence[torch.Tensor],
        slots: Sequence[int],
    ) -> None:  # fmt: skip
        for segment, chunk in zip(segments, chunks, strict=True):
            for place, piece in zip(slots[segment.start : segment.end], chunk.tensor, strict=True):
                parts = piece.split(self._geometry.piece_bytes)
                for row, part in zip(rows, parts, strict=True):
                    row[place].copy_(part)
