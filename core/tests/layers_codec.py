"""A codec with a stream of its own length for each layer, for the tests of layers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch

from kvloom import Buffer, Buffers, Chunk, Config, CorruptBlobError, MemoryFormat, Serializer


class StreamsSerializer(Serializer):
    """Deflates each layer, or each layer of K and of V, by itself; a first buffer, which all of them need, says how."""

    type = "streams"
    formats = frozenset({MemoryFormat.KV_BLOB})
    by_layer = True
    before: ClassVar[Callable[[range], None]] = staticmethod(lambda layers: None)
    """Called before layers are decoded, with which."""
    table: ClassVar[Callable[[list[list[int]]], Any]] = staticmethod(lambda numbers: numbers)
    """Changes the answer of `layer_buffers`."""

    class Config(Config):
        """The placement of layers in buffers."""

        form: Literal["layer", "plane", "pair"] = "layer"
        """`layer`: K and V together; `plane`: all of K, then all of V; `pair`: two layers together."""

    @property
    def params(self) -> Mapping[str, Any]:
        return {"form": self.config.form}  # type: ignore[attr-defined]

    def encode(self, chunk: Chunk) -> Buffers:
        form, tensor = self.params["form"], chunk.tensor
        if form == "plane":
            parts = [layer for plane in tensor for layer in plane]
        else:
            parts = list(tensor.split(2 if form == "pair" else 1, dim=1))
        return [b"deflate", *(zlib.compress(bytes_of(part), 1) for part in parts)]

    def decode(self, blob: Buffers, into: Chunk) -> None:
        layers = range(into.tensor.shape[1])
        self._decode(blob, layers, into)

    def layer_buffers(
        self, lengths: Sequence[int], like: Chunk, params: Mapping[str, Any]
    ) -> Sequence[Sequence[int]] | None:
        planes, layers = like.tensor.shape[:2]
        if params["form"] == "plane":
            numbers = [[0, *(1 + plane * layers + layer for plane in range(planes))] for layer in range(layers)]
        else:
            numbers = [[0, 1 + layer // (2 if params["form"] == "pair" else 1)] for layer in range(layers)]
        return type(self).table(numbers)  # type: ignore[no-any-return]

    def decode_layers(self, blob: Buffers, layers: range, into: Chunk) -> None:
        type(self).before(layers)
        self._decode(blob, layers, into)

    def _decode(self, blob: Buffers, layers: range, into: Chunk) -> None:
        if bytes(blob[0]) != b"deflate":
            raise CorruptBlobError("not deflated")
        form, tensor = self.params["form"], into.tensor
        if form == "plane":
            rows = [layer for plane in tensor for layer in plane]
        elif form == "layer":
            rows = list(tensor.split(1, dim=1))
        else:
            self._decode_pairs(blob[1:], layers, tensor)
            return
        for row, data in zip(rows, blob[1:], strict=True):
            row.copy_(inflated(data, row))

    def _decode_pairs(self, blob: Buffers, layers: range, tensor: torch.Tensor) -> None:
        planes, _, tokens, hidden = tensor.shape
        pairs = sorted({layer // 2 for layer in layers})
        for pair, data in zip(pairs, blob, strict=True):
            flat = torch.frombuffer(bytearray(zlib.decompress(data)), dtype=torch.uint8).view(tensor.dtype)
            both = flat.view(planes, -1, tokens, hidden)
            for layer in range(2 * pair, 2 * pair + both.shape[1]):
                if layer in layers:
                    tensor[:, layer - layers.start] = both[:, layer - 2 * pair]


class LossyStreamsSerializer(StreamsSerializer):
    """Keeps the sign of every value."""

    type = "lossy_streams"
    lossless = False

    def encode(self, chunk: Chunk) -> Buffers:
        signs = torch.where(chunk.tensor > 0, 1.0, -1.0).to(chunk.tensor.dtype)
        return super().encode(Chunk(signs, chunk.format, chunk.num_tokens, chunk.fidelity))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def inflated(data: Buffer, like: torch.Tensor) -> torch.Tensor:
    try:
        flat = torch.frombuffer(bytearray(zlib.decompress(data)), dtype=torch.uint8).view(like.dtype)
        return flat.view(like.shape)
    except (zlib.error, RuntimeError) as error:
        raise CorruptBlobError(str(error)) from None
