"""A connector of KV in slots, as paged engines keep it, by the shortest way that is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvloom import Chunk, GPUConnector, Segment


class SlotsConnector(GPUConnector):
    """where: `pool`, a tensor `[planes, layers, slots, hidden]`; `slots`, 1-D int64: the slot of each token."""

    type = "kit_slots"

    def check(self, where: Mapping[str, Any], num_tokens: int) -> None:
        if set(where) != {"pool", "slots"}:
            raise ValueError(f"expected pool= and slots=, got {sorted(where)}")
        self._check(**where, num_tokens=num_tokens)

    def _check(self, pool: Any, slots: Any, num_tokens: int) -> None:
        assert self.spec is not None
        planes, layers, _, hidden = self.spec.blob_shape(1)
        if not isinstance(pool, torch.Tensor) or pool.dtype != self.spec.torch_dtype:
            raise ValueError(f"pool: not a tensor of {self.spec.dtype}")
        if pool.dim() != 4 or (*pool.shape[:2], pool.shape[3]) != (planes, layers, hidden):
            raise ValueError(f"pool: [{planes}, {layers}, slots, {hidden}] expected, not {list(pool.shape)}")
        if not isinstance(slots, torch.Tensor) or slots.dtype != torch.int64 or slots.dim() != 1:
            raise ValueError("slots: not a 1-D tensor of int64")
        if slots.numel() < num_tokens or (num_tokens and not 0 <= int(slots.min()) <= int(slots.max()) < pool.shape[2]):
            raise ValueError(f"slots: not {num_tokens} slots of the pool")

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            chunk.tensor.copy_(where["pool"][:, :, where["slots"][segment.start : segment.end]])

    @torch.inference_mode()
    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            where["pool"][:, :, where["slots"][segment.start : segment.end]] = chunk.tensor

    def read_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        self.check(where, max(segment.end for segment in segments))
        for segment, chunk in zip(segments, chunks, strict=True):
            chunk.tensor.copy_(where["pool"][:, layer : layer + 1, where["slots"][segment.start : segment.end]])

    @torch.inference_mode()
    def write_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            where["pool"][:, layer : layer + 1, where["slots"][segment.start : segment.end]] = chunk.tensor
