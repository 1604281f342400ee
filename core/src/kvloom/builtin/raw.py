"""Chunks as they lie in memory: one buffer per layer of K and of V, nothing copied on the way out or in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvloom import Buffers, Chunk, CorruptBlobError, MemoryFormat, Serializer

_SMALL_BYTES = 1 << 20


class RawSerializer(Serializer):
    """The identity. Each layer's K and V is a buffer of its own, so that each has its own checksum."""

    type = "raw"
    lossless = True
    by_layer = True

    def encode(self, chunk: Chunk) -> Buffers:
        import torch

        data = memoryview(chunk.tensor.detach().contiguous().view(torch.uint8).numpy().data).cast("B")
        if chunk.format is not MemoryFormat.KV_BLOB or len(data) <= _SMALL_BYTES:
            return [data]
        step = len(data) // (chunk.tensor.shape[0] * chunk.tensor.shape[1])
        return [data[start : start + step] for start in range(0, len(data), step)]

    def decode(self, blob: Buffers, into: Chunk) -> None:
        import numpy as np
        import torch

        flat = into.tensor.view(torch.uint8).view(-1).numpy()
        parts = [np.frombuffer(buffer, dtype=np.uint8) for buffer in blob]
        if sum(part.size for part in parts) != flat.size:
            raise CorruptBlobError("the blob is not as long as its chunk")
        at = 0
        for part in parts:
            flat[at : at + part.size] = part
            at += part.size

    def layer_buffers(
        self, lengths: Sequence[int], like: Chunk, params: Mapping[str, Any]
    ) -> Sequence[Sequence[int]] | None:
        if like.format is not MemoryFormat.KV_BLOB:
            return None
        planes, layers = like.tensor.shape[:2]
        if tuple(lengths) != (like.nbytes // (planes * layers),) * (planes * layers):
            return None
        return [range(layer, planes * layers, layers) for layer in range(layers)]

    def decode_layers(self, blob: Buffers, layers: range, into: Chunk) -> None:
        import numpy as np
        import torch

        rows = [layer.view(torch.uint8).view(-1) for plane in into.tensor for layer in plane]
        if [row.numel() for row in rows] != [memoryview(buffer).nbytes for buffer in blob]:
            raise CorruptBlobError("the buffers are not as long as their layers")
        for row, buffer in zip(rows, blob, strict=True):
            row.numpy()[:] = np.frombuffer(buffer, dtype=np.uint8)

    def view(self, blob: memoryview, like: Chunk) -> Chunk | None:
        import torch

        if len(blob) != like.nbytes:
            raise CorruptBlobError("the blob is not as long as its chunk")
        if not like.tensor.is_meta:
            return like
        tensor = torch.frombuffer(blob, dtype=torch.uint8).view(like.tensor.dtype).view(like.tensor.shape)
        return Chunk(tensor, like.format, like.num_tokens, like.fidelity)

    def max_encoded_bytes(self, chunk: Chunk) -> int:
        return chunk.nbytes
