"""KV as bytes that say all about themselves, for where there is no engine: kvloom's envelope round the streams.

It says shape, dtype and whose KV it is, and has checksums of itself and of each stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvloom import EXACT, Buffer, Chunk, CorruptBlobError, MemoryFormat, UnreadableBlobError, envelope, join
from kvloom_serde_cachegen.serializer import CacheGenSerializer
from kvloom_serde_cachegen.settings import CodecConfig
from kvloom_serde_cachegen.streams import MOST_SIZE

MAX_BYTES = 1 << 32
"""Default limit on the KV of one blob: a small blob may claim any size."""
_MOST_STREAMS = 1 << 16
"""Maximum number of streams in all layers of all chunks of a prompt."""
DESCRIBED_AT = 112
"""The byte at which a blob's description starts."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.uint8,
)}  # fmt: skip


def to_bytes(
    kv: torch.Tensor, config: CodecConfig | None = None, *, model: str = "", start: int | None = None
) -> bytes:
    """`kv`, `[planes, layers, tokens, hidden]`, encoded.

    model: the model's name, which a reader must repeat. start: the position of the first token, which `mode: klt` uses.
    """
    serializer = CacheGenSerializer(config or CodecConfig())
    streams = serializer.encode(Chunk(kv.contiguous(), MemoryFormat.KV_BLOB, kv.shape[2], start=start))
    return pack(streams, kv.shape, kv.dtype, fidelity=serializer.fidelity, model=model)


def from_bytes(
    data: Buffer, config: CodecConfig | None = None, *, model: str = "",
    shape: Sequence[int] | None = None, dtype: torch.dtype | None = None, max_bytes: int = MAX_BYTES,
) -> torch.Tensor:  # fmt: skip
    """Decode the KV of `to_bytes`, exactly or as near as the codec keeps it, into new memory.

    config: the encoder's configuration, if it names a profile. shape, dtype: the expected ones, if they matter. Raises
    CorruptBlobError, with the problem and the byte (of the blob, or of a stream), for anything but an unchanged blob of
    that model, shape and dtype, with at most `max_bytes` of KV; UnreadableBlobError for one in `mode: klt` whose
    profile is missing.
    """
    about, streams = unpack(data, model=model, max_bytes=max_bytes)
    own = _DTYPES[about.dtype]
    if (shape is not None and tuple(shape) != about.shape) or dtype not in (None, own):
        raise CorruptBlobError(f"byte {DESCRIBED_AT}: KV of {about.shape} and {own}, where other KV is wanted")
    kv = torch.empty(about.shape, dtype=own)
    try:
        serializer = CacheGenSerializer(config or CodecConfig())
        serializer.decode(streams, Chunk(kv, MemoryFormat.KV_BLOB, kv.shape[2]))
    except CorruptBlobError as error:
        begin = len(memoryview(data).cast("B")) - sum(map(len, streams))
        raise CorruptBlobError(f"byte {begin} and what follows: {error}") from error
    return kv


def pack(
    streams: Sequence[Buffer], shape: Sequence[int], dtype: torch.dtype, *, fidelity: str = EXACT, model: str = "",
    params: Mapping[str, Any] | None = None,
) -> bytes:  # fmt: skip
    """Streams of KV of `shape`, `[planes, layers, tokens, hidden]`, in an envelope. params: JSON values."""
    name = str(dtype).removeprefix("torch.")
    about = envelope.Description(
        key=model, serializer=CacheGenSerializer.type, shape=tuple(shape), dtype=name,
        format=MemoryFormat.KV_BLOB.value, num_tokens=shape[2], fidelity=fidelity, params=params or {},
    )  # fmt: skip
    return join(envelope.seal(about, streams, max_buffers=_MOST_STREAMS))


def unpack(
    data: Buffer, *, model: str = "", max_bytes: int = MAX_BYTES
) -> tuple[envelope.Description, list[memoryview]]:
    """Return the arguments of `pack`, every byte verified. Raises CorruptBlobError as `from_bytes` does."""
    try:
        header, payload = envelope.unseal(data, key=model, max_buffers=_MOST_STREAMS)
    except UnreadableBlobError as error:  # Nobody keeps it for a later release to read: it is as good as damaged.
        raise CorruptBlobError(f"byte 8: {error}") from error
    about = header.description
    # Its checksum is valid, but anyone can compute a valid checksum.
    well_formed = (
        about.serializer == CacheGenSerializer.type
        and about.format == MemoryFormat.KV_BLOB.value
        and isinstance(about.dtype, str)
        and about.dtype in _DTYPES
        and len(about.shape) == 4
        and all(type(size) is int and 0 < size <= MOST_SIZE for size in about.shape)
        and about.shape[3] * _DTYPES[about.dtype].itemsize <= MOST_SIZE
        and isinstance(about.params, Mapping)
    )
    if not well_formed:
        raise CorruptBlobError(f"byte {DESCRIBED_AT}: no description of KV in such streams")
    if math.prod(about.shape) * _DTYPES[about.dtype].itemsize > max_bytes:
        raise CorruptBlobError(f"byte {DESCRIBED_AT}: KV of {about.shape}, which is more than {max_bytes} bytes")
    return about, envelope.split(header, payload)
