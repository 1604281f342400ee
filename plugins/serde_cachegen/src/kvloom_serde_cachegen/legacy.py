"""LMCache's names for CacheGen, for existing code: its quantiser on tensors, its outputs as our streams.

A stream holds its scales, levels and coding, so that no CDFs, maxima and buffers need be passed. KV
is `[layers, 2, tokens, heads, head_size]` here, as LMCache has it. Everything is in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvloom import Buffer, Buffers, CorruptBlobError
from kvloom_serde_cachegen import container, streams
from kvloom_serde_cachegen.bins import CacheGenConfig
from kvloom_serde_cachegen.streams import Mode, Settings

_BAND = 128
_SCALES_AT = 36
"""In a stream of K and V: its header, and the bins of both."""


# -- the quantiser -----------------------------------------------------------------------------------------------------


def make_key_bins(config: CacheGenConfig) -> torch.Tensor:
    """The bins of K, int32 `[layers]`."""
    return torch.tensor([keys for keys, _ in config.by_layer()], dtype=torch.int32)


def make_value_bins(config: CacheGenConfig) -> torch.Tensor:
    """The bins of V, int32 `[layers]`."""
    return torch.tensor([values for _, values in config.by_layer()], dtype=torch.int32)


def torch_quant(bins: int, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels of `[..., channels]` about 0, whole numbers in float32, and what the largest of each row stands for."""
    half = bins // 2 - 1
    most = tensor.abs().amax(dim=-1, keepdim=True)
    return torch.round(tensor.float() * _factor(half, most)), most


def torch_quant_vectorized(bins: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch_quant` of `[layers, tokens, channels]`, each layer with its own bins; levels are int8, from 0 on."""
    half = _halves(bins)
    most = groups.abs().amax(dim=-1, keepdim=True)
    return torch.round(groups.float() * _factor(half, most) + half).to(torch.int8), most


def quant(bins: int, levels: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """Values for the levels of `torch_quant`: the inverse, in spite of the name."""
    return levels / (bins // 2 - 1) * most


def do_dequantize(levels: torch.Tensor, bins: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """Values for the levels of `torch_quant_vectorized`."""
    half = _halves(bins)
    return (levels - half) / half * most


def concat_max(most: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The largest of each token, by layer `[tokens, 1]`, as one tensor `[layers, tokens, 1]`."""
    return torch.stack([most[layer] for layer in sorted(most)])


def _halves(bins: torch.Tensor) -> torch.Tensor:
    return (bins // 2 - 1).float()[:, None, None]


def _factor(half: torch.Tensor | int, most: torch.Tensor) -> torch.Tensor:
    """Levels per value. Works for rows of zeros too, whose levels are those of 0."""
    return torch.where(most > 0, half / most.float(), 0.0)


# -- streams -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheGenBytestream:
    """The streams of some tokens, one for each layer, one after the other."""

    bytestream: torch.Tensor
    """uint8"""
    bytestream_lengths: torch.Tensor
    """int64 `[layers]`, in bytes."""
    ntokens: int


@dataclass(frozen=True, slots=True)
class CacheGenEncoderOutput:
    """Encoded KV."""

    data_chunks: Sequence[CacheGenBytestream]
    dtype: torch.dtype
    num_heads: int
    head_size: int

    @property
    def nlayers(self) -> int:
        return len(self.data_chunks[0].bytestream_lengths)

    @property
    def ntokens(self) -> int:
        return sum(chunk.ntokens for chunk in self.data_chunks)

    @property
    def bytestream(self) -> bytes:
        """All streams: chunk after chunk, layer after layer."""
        return b"".join(chunk.bytestream.numpy().tobytes() for chunk in self.data_chunks)

    @property
    def start_indices(self) -> torch.Tensor:
        """The begin of each stream in `bytestream`: int64 `[chunks, layers]`."""
        lengths = torch.stack([chunk.bytestream_lengths for chunk in self.data_chunks])
        return (lengths.flatten().cumsum(0) - lengths.flatten()).view(lengths.shape)

    @property
    def max_tensors_key(self) -> torch.Tensor:
        """The scales of K, `[layers, tokens, 1]`. Raises CorruptBlobError if the streams have none."""
        return self._scales(0)

    @property
    def max_tensors_value(self) -> torch.Tensor:
        """The scales of V, as those of K."""
        return self._scales(1)

    def to_bytes(self) -> bytes:
        """Bytes that say all about themselves, without pickle; `container.from_bytes` reads those of one chunk too."""
        streams_of_all = [stream for chunk in self.data_chunks for stream in recombine_bytes(chunk)]
        shape = (2, self.nlayers, self.ntokens, self.num_heads * self.head_size)
        params = {"heads": self.num_heads, "chunks": [chunk.ntokens for chunk in self.data_chunks]}
        return container.pack(streams_of_all, shape, self.dtype, fidelity="cachegen/bins", params=params)

    @classmethod
    def from_bytes(cls, data: Buffer) -> CacheGenEncoderOutput:
        """The inverse. Raises CorruptBlobError with the problem and the byte."""
        about, parts = container.unpack(data)
        planes, layers, tokens, hidden = about.shape
        dtype = getattr(torch, about.dtype)
        heads, chunks = about.params.get("heads"), about.params.get("chunks")
        well_formed = (
            planes == 2
            and dtype in streams.DTYPES
            and type(heads) is int
            and heads > 0
            and hidden % heads == 0
            and isinstance(chunks, list)
            and all(type(count) is int and count > 0 for count in chunks)
            and sum(chunks) == tokens
            and len(parts) == layers * len(chunks)
        )
        if not well_formed:
            raise CorruptBlobError(f"byte {container.DESCRIBED_AT}: not the chunks of a CacheGenEncoderOutput")
        data_chunks = [
            collect_bytes(parts[number * layers : (number + 1) * layers], count) for number, count in enumerate(chunks)
        ]
        return cls(data_chunks, dtype, heads, hidden // heads)

    def _scales(self, plane: int) -> torch.Tensor:
        parts = []
        for chunk in self.data_chunks:
            for stream in recombine_bytes(chunk):
                begin = _SCALES_AT + plane * chunk.ntokens * self.dtype.itemsize
                found = bytearray(stream[begin : begin + chunk.ntokens * self.dtype.itemsize])
                if streams.mode_of(stream) is not Mode.CACHEGEN or len(found) != chunk.ntokens * self.dtype.itemsize:
                    raise CorruptBlobError(f"byte {begin} of a stream: no scales")
                parts.append(torch.frombuffer(found, dtype=self.dtype).view(chunk.ntokens, 1))
        by_layer = [torch.cat(parts[layer :: self.nlayers]) for layer in range(self.nlayers)]
        return torch.stack(by_layer)


def encode_function(kv: torch.Tensor, config: CacheGenConfig, chunk_size: int) -> CacheGenEncoderOutput:
    """`kv`, `[layers, 2, tokens, heads, head_size]`, quantised and coded, `chunk_size` tokens at a time."""
    layers, planes, _, heads, head_size = kv.shape
    if planes != 2 or layers != config.nlayers or chunk_size < 1:
        raise ValueError(
            f"expected KV with 2 planes, chunk_size of 1 or more, and bins for its layers; got KV of shape "
            f"{tuple(kv.shape)}, chunk_size {chunk_size}, and bins for {config.nlayers} layers"
        )
    by_plane = kv.contiguous().flatten(3).transpose(0, 1)
    settings = Settings(Mode.CACHEGEN, min(_BAND, heads * head_size), bins=config.by_layer())
    parts = by_plane.split(chunk_size, dim=2)
    chunks = [collect_bytes(streams.encode(part, settings), part.shape[2]) for part in parts]
    return CacheGenEncoderOutput(chunks, kv.dtype, heads, head_size)


def decode_function(output: CacheGenEncoderOutput) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, `[layers, tokens, channels]` each. Raises CorruptBlobError."""
    buffer = get_output_buffer(output.nlayers, output.num_heads * output.head_size, output.ntokens, output.dtype)
    start = 0
    for chunk in output.data_chunks:
        decode_chunk(chunk, buffer[:, start : start + chunk.ntokens])
        start += chunk.ntokens
    return buffer[: output.nlayers], buffer[output.nlayers :]


def decode_chunk(data_chunk: CacheGenBytestream, target_buffer: torch.Tensor) -> None:
    """Fill `target_buffer`, `[layers of K, then those of V; tokens, channels]`. Raises CorruptBlobError."""
    streams.decode(recombine_bytes(data_chunk), target_buffer.unflatten(0, (2, -1)), Mode.CACHEGEN)


def get_output_buffer(nlayers: int, nchannels: int, ntokens: int, dtype: torch.dtype) -> torch.Tensor:
    """The output tensor of `decode_chunk`."""
    return torch.empty((2 * nlayers, ntokens, nchannels), dtype=dtype)


def collect_bytes(parts: Buffers, ntokens: int) -> CacheGenBytestream:
    """Streams, one for each layer, as one tensor."""
    lengths = torch.tensor([len(part) for part in parts])
    return CacheGenBytestream(torch.from_numpy(np.frombuffer(b"".join(parts), np.uint8).copy()), lengths, ntokens)


def recombine_bytes(data_chunk: CacheGenBytestream) -> list[memoryview]:
    """The streams of `collect_bytes`. Raises CorruptBlobError if there is more or less of them than lengths say."""
    whole, lengths = memoryview(data_chunk.bytestream.numpy()), data_chunk.bytestream_lengths.tolist()
    if min(lengths, default=0) < 0 or sum(lengths) != len(whole):
        raise CorruptBlobError(f"streams of {lengths} bytes in {len(whole)}")
    ends = np.cumsum(lengths)
    return [whole[end - length : end] for end, length in zip(ends, lengths, strict=True)]
