"""A lossless serializer, by the shortest way that is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvloom import Buffer, Buffers, Chunk, CorruptBlobError, MemoryFormat, Serializer


class RowsSerializer(Serializer):
    """The bytes of a chunk as they are: a buffer for each layer of each plane; of pages, one for all."""

    type = "kit_rows"
    by_layer = True

    def encode(self, chunk: Chunk) -> Buffers:
        return [row.clone().numpy().tobytes() for row in _rows(chunk)]

    def decode(self, blob: Buffers, into: Chunk) -> None:
        _fill(_rows(into), blob)

    def view(self, blob: memoryview, like: Chunk) -> Chunk | None:
        if blob.nbytes != like.nbytes:
            return None
        tensor = torch.frombuffer(blob, dtype=torch.uint8).view(like.tensor.dtype).view(like.tensor.shape)
        return Chunk(tensor, like.format, like.num_tokens, like.fidelity)

    def max_encoded_bytes(self, chunk: Chunk) -> int:
        return chunk.nbytes

    def layer_buffers(
        self, lengths: Sequence[int], like: Chunk, params: Mapping[str, Any]
    ) -> Sequence[Sequence[int]] | None:
        if like.format is not MemoryFormat.KV_BLOB:
            return None
        planes, layers = like.tensor.shape[:2]
        return [range(layer, planes * layers, layers) for layer in range(layers)]

    def decode_layers(self, blob: Buffers, layers: range, into: Chunk) -> None:
        _fill(_rows(into), blob)


def _rows(chunk: Chunk) -> list[torch.Tensor]:
    """The bytes of each layer of each plane."""
    if chunk.format is not MemoryFormat.KV_BLOB:
        return [chunk.tensor.view(-1).view(torch.uint8)]
    return [layer.view(-1).view(torch.uint8) for plane in chunk.tensor for layer in plane]


def _fill(rows: Sequence[torch.Tensor], blob: Sequence[Buffer]) -> None:
    if [row.numel() for row in rows] != [memoryview(buffer).nbytes for buffer in blob]:
        raise CorruptBlobError("the buffers are not as long as what they are for")
    for row, buffer in zip(rows, blob, strict=True):
        row.copy_(torch.frombuffer(bytearray(buffer), dtype=torch.uint8))
