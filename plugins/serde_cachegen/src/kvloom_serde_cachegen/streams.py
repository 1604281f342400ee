"""Streams of the native codec: one layer of one chunk each, encoded and decoded from memory to memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np
import torch

from kvloom import Buffer, CorruptBlobError, UnreadableBlobError, native
from kvloom_serde_cachegen.native_profile import NativeProfile

TILE_TOKENS = 256
MAX_BAND = 1024
POSITIONS = 1 << 24
"""Positions from here on count as unknown in `KLT`."""

DTYPES = {
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float32: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
}
"""Dtypes that `step` and `cachegen` accept, with their numbers in a stream."""
_BYTES = 6
"""The number of dtypes whose elements are coded byte by byte."""


class Mode(IntEnum):
    STEP = 1
    LOSSLESS = 2
    CACHEGEN = 3
    KLT = 4


_PROBLEMS = {
    1: "truncated or longer than it says",
    2: "not such a stream",
    3: "of another version",
    4: "of another geometry",
    5: "tiles that are not where they should be",
    6: "a bad table",
    7: "words that do not decode",
    8: "bytes that should be zero",
}
_NO_ROOM, _NO_PROFILE = 9, 11
MOST_SIZE = (1 << 31) - 1
"""Maximum number of planes, of tokens, and of bytes of a token's channels."""
_HEADER_BYTES = 32


class _Geometry(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("dtype", "planes", "tokens", "hidden")]


class _Settings(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("mode", "band", "tile_tokens", "shared_from")),
        ("step", ctypes.c_float),
    ]


class Encode(ctypes.Structure):
    """`KvzEncode`"""

    _fields_ = [
        ("source", ctypes.c_void_p),
        ("plane_stride", ctypes.c_int64),
        ("weights", ctypes.c_void_p * 2),
        ("bins", ctypes.c_int32 * 2),
        ("start", ctypes.c_int32),
        ("profile", ctypes.c_void_p),
        ("bases", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("error", ctypes.c_int32),
    ]


class Decode(ctypes.Structure):
    """`KvzDecode`"""

    _fields_ = [
        ("stream", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("target", ctypes.c_void_p),
        ("plane_stride", ctypes.c_int64),
        ("profile", ctypes.c_void_p),
        ("bases", ctypes.c_void_p),
        ("error", ctypes.c_int32),
        ("offset", ctypes.c_int64),
    ]


@cache
def library() -> ctypes.CDLL:
    """The native codec. Raises PluginError, with the remedy, if it was not built."""
    codec = native.load("kvloom_serde_cachegen", "kvz")
    for name in ("kvz_bound", "kvz_encode_workspace", "kvz_decode_workspace"):
        getattr(codec, name).restype = ctypes.c_int64
    return codec


def instructions() -> int:
    """The best instruction set of this machine that the codec has: 0 portable, 1 AVX2, 2 AVX-512."""
    return int(library().kvz_instructions())


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of encoding."""

    mode: Mode
    band: int = 128
    """Channels of a tile, at most MAX_BAND; not for `LOSSLESS`."""
    shared_from: int = 0
    """`STEP`: the channels of the first plane before this one share a step, the others have one each. Those of the
    second plane always share one."""
    step: float = 0.5
    """`STEP`: in standard deviations."""
    weights: torch.Tensor | None = None
    """`STEP`: relative steps of the channels of each plane, or of the first alone, float32 `[planes, layers, hidden]`;
    else they follow standard deviations."""
    bins: Sequence[tuple[int, int]] = ()
    """`CACHEGEN`: for each layer those of K and of V, 4 to 63."""
    profile: NativeProfile | None = None
    """`KLT`: that of the model."""

    def native(self) -> _Settings:
        return _Settings(self.mode, self.band, TILE_TOKENS, self.shared_from, self.step)


def bound(shape: Sequence[int], dtype: torch.dtype, settings: Settings) -> int:
    """The most bytes that the streams of a chunk of `[planes, layers, tokens, hidden]` take, all together."""
    geometry = geometry_of(shape, dtype, settings.mode)
    each: int = library().kvz_bound(ctypes.byref(geometry), ctypes.byref(settings.native()))
    if each < 0:
        raise ValueError(f"streams of {tuple(shape)} and {dtype} with {settings} cannot be made")
    return shape[1] * each


def encode(
    kv: torch.Tensor, settings: Settings, *, start: int | None = None, threads: int = 0, with_instructions: int = -1
) -> list[memoryview]:
    """One stream for each layer of `kv`, `[planes, layers, tokens, hidden]` in host memory.

    Each layer of a plane is contiguous. start: the position of the first token, without which `KLT` leaves K as `STEP`
    would have it. threads: 0 for as many as there are processors. with_instructions: as
    `instructions` says; all give the same bytes.
    """
    layers = kv.shape[1]
    check_layout(kv)
    codec, own = library(), settings.native()
    geometry = geometry_of(kv.shape, kv.dtype, settings.mode)
    capacity = bound(kv.shape, kv.dtype, settings) // layers
    out = np.empty((layers, capacity), dtype=np.uint8)
    jobs = (Encode * layers)()
    for layer, job in enumerate(jobs):
        job.source = kv.data_ptr() + layer * kv.stride(1) * kv.element_size()
        job.plane_stride = plane_stride(kv, geometry)
        job.weights[:] = weights_of(settings.weights, layer)
        job.bins[:] = settings.bins[layer] if settings.bins else (0, 0)
        job.start = start if start is not None and 0 <= start < POSITIONS else -1
        job.profile, job.bases = addresses(settings.profile, layer, kv.device)
        job.out, job.capacity = out[layer].ctypes.data, capacity
    threads, workspace = _workspace(
        threads, layers, codec.kvz_encode_workspace(ctypes.byref(geometry), ctypes.byref(own))
    )
    error = codec.kvz_encode(
        ctypes.byref(geometry), ctypes.byref(own), jobs, layers, ctypes.c_void_p(workspace.ctypes.data), threads,
        _set(with_instructions),
    )  # fmt: skip
    if error:
        raise ValueError(f"streams of {tuple(kv.shape)} and {kv.dtype} cannot be made: {error}")
    return [memoryview(out[layer])[: job.size] for layer, job in enumerate(jobs)]


def decode(
    streams: Sequence[Buffer], into: torch.Tensor, mode: Mode, *, first_layer: int = 0,
    profile: NativeProfile | None = None, threads: int = 0, with_instructions: int = -1,
) -> None:  # fmt: skip
    """Fill `into`, in the form of `encode`, from one stream for each of its layers.

    mode: LOSSLESS or another. profile: for streams of mode `KLT`; `into` begins with its layer `first_layer`. Raises
    CorruptBlobError, with the first problem and its place; UnreadableBlobError without the right profile.
    """
    layers = into.shape[1]
    check_layout(into)
    if len(streams) != layers:
        raise CorruptBlobError(f"{len(streams)} streams for {layers} layers")
    codec = library()
    geometry = geometry_of(into.shape, into.dtype, mode)
    held = [np.frombuffer(stream, dtype=np.uint8) for stream in streams]
    jobs = (Decode * layers)()
    for layer, (stream, job) in enumerate(zip(held, jobs, strict=True)):
        job.stream, job.size = stream.ctypes.data, stream.size
        job.target = into.data_ptr() + layer * into.stride(1) * into.element_size()
        job.plane_stride = plane_stride(into, geometry)
        job.profile, job.bases = addresses(profile, first_layer + layer, into.device)
    transformed = int(profile is not None)
    threads, workspace = _workspace(threads, layers, codec.kvz_decode_workspace(ctypes.byref(geometry), transformed))
    refused = codec.kvz_decode(
        ctypes.byref(geometry), jobs, layers, ctypes.c_void_p(workspace.ctypes.data), transformed, threads,
        _set(with_instructions),
    )  # fmt: skip
    check(jobs)
    if refused:
        raise CorruptBlobError(f"no streams can be of {tuple(into.shape)} and {into.dtype}: error {refused}")


def check_layout(kv: torch.Tensor) -> None:
    """Raises ValueError unless it is `[planes, layers, tokens, hidden]` and each layer of a plane is contiguous."""
    if kv.dim() != 4 or kv.stride(3) != 1 or (kv.shape[2] > 1 and kv.stride(2) != kv.shape[3]):
        raise ValueError(
            f"KV of shape {tuple(kv.shape)} and strides {kv.stride()}: layers of a plane are not contiguous"
        )


def check(jobs: Iterable[Decode]) -> None:
    """Raises CorruptBlobError or UnreadableBlobError for the first stream that was refused, and says where."""
    for layer, job in enumerate(jobs):
        if job.error == _NO_PROFILE:
            raise UnreadableBlobError(f"stream {layer} was transformed by a profile that is not at hand")
        if job.error == _NO_ROOM:
            raise UnreadableBlobError(f"stream {layer}: more tiles than one launch takes; decode fewer chunks at once")
        if job.error:
            problem = _PROBLEMS.get(job.error, f"error {job.error}")
            raise CorruptBlobError(f"stream {layer}, byte {job.offset}: {problem}")


def addresses(profile: NativeProfile | None, layer: int, device: torch.device) -> tuple[int | None, int | None]:
    """Addresses of a profile and of its bases of that layer, in the memory of `device`; None if there is none."""
    if profile is None:
        return None, None
    there = profile.on(device)
    return there.about, there.of_layer(layer)


def weights_of(weights: torch.Tensor | None, layer: int) -> tuple[int | None, int | None]:
    """Addresses of `Settings.weights` of one layer, for each plane; None where there are none."""
    given = [] if weights is None else [plane[layer].data_ptr() for plane in weights]
    return given[0] if given else None, given[1] if len(given) > 1 else None


def profile_of(stream: Buffer) -> bytes:
    """The id of the profile that a stream of mode `KLT` was encoded with, as far as the stream says."""
    return bytes(memoryview(stream).cast("B")[_HEADER_BYTES : _HEADER_BYTES + 16])


def mode_of(stream: Buffer) -> Mode:
    """The mode of an encoded stream. Raises CorruptBlobError if it is unknown."""
    head = memoryview(stream).cast("B")[:6]
    try:
        return Mode(head[5])
    except (IndexError, ValueError):
        raise CorruptBlobError("byte 5: unknown mode") from None


def geometry_of(shape: Sequence[int], dtype: torch.dtype, mode: Mode) -> _Geometry:
    planes, _, tokens, hidden = shape
    if max(planes, tokens, hidden * dtype.itemsize) > MOST_SIZE:
        raise ValueError(f"no streams are of {tuple(shape)} and {dtype}")  # ctypes would cut the numbers off
    if mode is Mode.LOSSLESS and (dtype.itemsize == 1 or dtype not in DTYPES):
        return _Geometry(_BYTES, planes, tokens, hidden * dtype.itemsize)
    return _Geometry(DTYPES[dtype], planes, tokens, hidden)


def plane_stride(kv: torch.Tensor, geometry: _Geometry) -> int:
    """From plane to plane, in elements of that geometry."""
    return kv.stride(0) * (kv.element_size() // {1: 2, 2: 2, 3: 4}.get(geometry.dtype, 1))


def _workspace(threads: int, jobs: int, each: int) -> tuple[int, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    threads = max(1, min(threads or _processors(), jobs))
    return threads, np.empty(threads * each, dtype=np.uint8)


def _processors() -> int:
    """Number of processors that this process may use; some systems do not say which."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _set(wanted: int) -> int:
    return instructions() if wanted < 0 else wanted
