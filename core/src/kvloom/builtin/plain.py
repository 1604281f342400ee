"""KV that is one tensor already: for research code, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvloom import Chunk, GPUConnector, MemoryFormat, Segment

if TYPE_CHECKING:
    import torch


class PlainConnector(GPUConnector):
    """where: `kv`, a tensor `[2, num_layers, num_tokens, hidden_dim]` of the whole sequence, on any device."""

    type = "plain"
    format = MemoryFormat.KV_BLOB

    def check(self, where: Mapping[str, Any], num_tokens: int) -> None:
        import torch

        assert self.spec is not None
        unknown = set(where) - {"kv"}
        if unknown or "kv" not in where:
            raise ValueError(f"plain connector: expected kv=<tensor>, got {sorted(where) or 'nothing'}")
        kv = where["kv"]
        planes, layers, _, hidden = self.spec.blob_shape(num_tokens)
        if not isinstance(kv, torch.Tensor):
            raise ValueError(
                f"kv: expected a tensor [{planes}, {layers}, >={num_tokens}, {hidden}], got {type(kv).__name__}"
            )
        fits = kv.dim() == 4 and (*kv.shape[:2], kv.shape[3]) == (planes, layers, hidden) and kv.shape[2] >= num_tokens
        if not fits or kv.dtype != self.spec.torch_dtype:
            raise ValueError(
                f"kv: expected [{planes}, {layers}, >={num_tokens}, {hidden}] of {self.spec.dtype}, "
                f"got {list(kv.shape)} of {kv.dtype}"
            )

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        import torch

        with torch.inference_mode():
            kv: torch.Tensor = where["kv"]
            for segment, chunk in zip(segments, chunks, strict=True):
                chunk.tensor.copy_(kv[:, :, segment.start : segment.end])

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        import torch

        with torch.inference_mode():
            kv: torch.Tensor = where["kv"]
            for segment, chunk in zip(segments, chunks, strict=True):
                kv[:, :, segment.start : segment.end].copy_(chunk.tensor)

    def read_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        import torch

        with torch.inference_mode():
            self.check(where, max(segment.end for segment in segments))
            kv: torch.Tensor = where["kv"]
            for segment, chunk in zip(segments, chunks, strict=True):
                chunk.tensor.copy_(kv[:, layer : layer + 1, segment.start : segment.end])

    def write_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        import torch

        with torch.inference_mode():
            kv: torch.Tensor = where["kv"]
            for segment, chunk in zip(segments, chunks, strict=True):
                kv[:, layer : layer + 1, segment.start : segment.end].copy_(chunk.tensor)
