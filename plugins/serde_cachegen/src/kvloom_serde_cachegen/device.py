"""Streams in device memory: the kernels give the same bytes and values as the processor does.

They decode all modes, and encode all but `KLT`, which goes through host memory.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from kvloom import Buffer, CorruptBlobError, PluginError, native
from kvloom.device import Device, device_of, stream_of_launch, synchronize
from kvloom_serde_cachegen import streams
from kvloom_serde_cachegen.native_profile import NativeProfile
from kvloom_serde_cachegen.streams import Mode, Settings

if TYPE_CHECKING:  # kernels are tested and measured on machines that have torch and little else
    from kvloom import Place

T = TypeVar("T")
ENCODES = frozenset({Mode.STEP, Mode.CACHEGEN, Mode.LOSSLESS})
DECODES = frozenset(Mode)
_ALIGN = 16
"""Streams are made at multiples of it, in bytes."""
_LEAST_ALIGN = 4
"""They are read at multiples of it."""


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where the plugin was built without them, or there is no device."""
    try:
        codec = native.load("kvloom_serde_cachegen", "kvz_cuda")
    except PluginError:
        return None
    return declared(codec) if codec.kvz_cuda_devices() > 0 else None


def declared(codec: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the result types."""
    for name in ("kvz_cuda_encode_workspace", "kvz_cuda_decode_workspace"):
        getattr(codec, name).restype = ctypes.c_int64
    return codec


def about() -> str:
    """The state of CUDA here, for people."""
    try:
        codec = native.load("kvloom_serde_cachegen", "kvz_cuda")
    except PluginError:
        return "built without CUDA: KV in device memory goes through host memory"
    return native.about_devices(codec.kvz_cuda_devices())


def of(kv: torch.Tensor) -> Device | None:
    """The device whose memory it is in; None for the host's."""
    its = device_of(kv.device)
    return its if its is not None and its.holds(kv) else None


class Launch:
    """One call of the kernels, which may be run again and again."""

    def __init__(
        self, function: Any, jobs: ctypes.Array[Any], about: Sequence[Any], needed: int, device: torch.device,
        workspace: torch.Tensor | None, held: Sequence[object],
    ) -> None:  # fmt: skip
        """about: what comes before the jobs. needed: bytes of scratch memory. held: what the jobs point to."""
        if workspace is None or workspace.numel() < needed or workspace.device != device:
            workspace = _empty(needed, device)
        self._jobs, self._there = jobs, _empty(ctypes.sizeof(jobs), device)
        here = torch.frombuffer(jobs, dtype=torch.uint8)
        _copy(self._there, here)
        self._held = [*held, workspace, here]
        self._device = device
        self._call = partial(function, *about, _pointer(self._there), len(jobs), _pointer(workspace))
        self._error = 0

    def run(self) -> None:
        """Put it on the current stream. Raises ValueError for what the kernels do not take."""
        its = device_of(self._device)
        if its is None:
            self._launch()
        else:
            its.queue(self._launch)
        self._check()

    def _launch(self) -> None:
        with stream_of_launch(self._device) as stream:
            self._error = self._call(ctypes.c_void_p(stream))

    def _check(self) -> None:
        if self._error > 0:
            raise ValueError(f"the CUDA kernels rejected the streams: error {self._error}")
        if self._error < 0:
            raise RuntimeError(f"CUDA error {-self._error}")

    def jobs(self) -> Any:
        """The jobs as the kernels leave them. Waits for them."""
        synchronize(self._device)
        self._check()
        return type(self._jobs).from_buffer_copy(self._there.cpu().numpy().tobytes())


def encoding(
    kvs: Sequence[torch.Tensor], settings: Settings, codec: ctypes.CDLL, workspace: torch.Tensor | None = None
) -> tuple[Launch, torch.Tensor]:
    """The launch that `encode` runs, and where its streams come to lie, uint8 `[streams, capacity]`."""
    first = kvs[0]
    layers, device = first.shape[1], first.device
    geometry, own = streams.geometry_of(first.shape, first.dtype, settings.mode), settings.native()
    capacity = streams.bound(first.shape, first.dtype, settings) // layers
    capacity = -(-capacity // _ALIGN) * _ALIGN
    out = torch.empty((len(kvs) * layers, capacity), dtype=torch.uint8, device=device)
    weights = None if settings.weights is None else settings.weights.to(device)
    jobs = (streams.Encode * (len(kvs) * layers))()
    for number, job in enumerate(jobs):
        kv, layer = kvs[number // layers], number % layers
        job.source, job.plane_stride = _layer(kv, layer), streams.plane_stride(kv, geometry)
        job.weights[:] = streams.weights_of(weights, layer)
        job.bins[:] = settings.bins[layer] if settings.bins else (0, 0)
        job.out, job.capacity = out[number].data_ptr(), capacity
    needed = codec.kvz_cuda_encode_workspace(ctypes.byref(geometry), ctypes.byref(own), len(jobs))
    if needed < 0:
        raise ValueError(f"streams of {tuple(first.shape)} and {first.dtype} with {settings} cannot be made")
    about = [ctypes.byref(geometry), ctypes.byref(own)]
    return Launch(codec.kvz_cuda_encode, jobs, about, needed, device, workspace, [out, weights, *kvs]), out


def encode(
    kvs: Sequence[torch.Tensor], settings: Settings, codec: ctypes.CDLL, *, workspace: torch.Tensor | None = None
) -> list[list[memoryview]]:
    """Streams in host memory of each of `kvs`, `[planes, layers, tokens, hidden]` of one shape, on one device.

    Of a mode in ENCODES. workspace: uint8 on that device; if it is None or too small, another is taken. Waits for the
    device.
    """
    launch, out = encoding(kvs, settings, codec, workspace)
    launch.run()
    jobs = launch.jobs()
    if error := next((job.error for job in jobs if job.error), 0):
        raise ValueError(f"streams of {tuple(kvs[0].shape)} and {kvs[0].dtype} cannot be made: {error}")
    sizes = [job.size for job in jobs]
    host = torch.cat([out[number, :size] for number, size in enumerate(sizes)]).cpu().numpy()
    ends = np.cumsum(sizes)
    made = [memoryview(host[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    layers = kvs[0].shape[1]
    return [made[start : start + layers] for start in range(0, len(made), layers)]


def decoding(
    blobs: Sequence[Sequence[Buffer]], into: Sequence[torch.Tensor], mode: Mode, codec: ctypes.CDLL,
    workspace: torch.Tensor | None = None, *, first_layer: int = 0, profile: NativeProfile | None = None,
) -> Launch:  # fmt: skip
    """The launch that `decode` runs; the streams are on their way to the device."""
    first = into[0]
    layers, device = first.shape[1], first.device
    for blob in blobs:
        if len(blob) != layers:
            raise CorruptBlobError(f"{len(blob)} streams for {layers} layers")
    geometry = streams.geometry_of(first.shape, first.dtype, mode)
    held = [np.frombuffer(stream, dtype=np.uint8) for blob in blobs for stream in blob]
    starts, there, packed = _uploaded(held, layers, device)
    jobs = (streams.Decode * len(held))()
    for number, (job, each) in enumerate(zip(jobs, held, strict=True)):
        kv = into[number // layers]
        job.stream, job.size = there.data_ptr() + starts[number], each.size
        job.target, job.plane_stride = _layer(kv, number % layers), streams.plane_stride(kv, geometry)
        job.profile, job.bases = streams.addresses(profile, first_layer + number % layers, device)
    needed = codec.kvz_cuda_decode_workspace(ctypes.byref(geometry), int(mode), len(jobs))
    if needed < 0:
        raise ValueError(f"streams of mode {mode.name.lower()} of {tuple(first.shape)} and {first.dtype} are not taken")
    about = [ctypes.byref(geometry), int(mode)]
    return Launch(codec.kvz_cuda_decode, jobs, about, needed, device, workspace, [*held, packed, there, profile, *into])


def _uploaded(
    held: Sequence[np.ndarray[Any, Any]], layers: int, device: torch.device
) -> tuple[list[int], torch.Tensor, torch.Tensor | None]:
    """Begin to copy the streams, `layers` of each blob, to the device.

    Returns the offset of each stream in the device memory, that memory, and host memory to keep until the copies are
    done. Adjacent streams of a blob in pinned memory, such as the pool's, are copied from there by one call.
    """
    runs: list[list[int]] = []  # the numbers of streams that follow each other, all at multiples of 4
    ends: int | None = None
    for number, each in enumerate(held):
        begin = each.ctypes.data
        if number % layers and begin == ends and (begin - held[runs[-1][0]].ctypes.data) % _LEAST_ALIGN == 0:
            runs[-1].append(number)
        else:
            runs.append([number])
        ends = begin + each.size
    starts, size = [0] * len(held), 0
    for run in runs:
        first = held[run[0]].ctypes.data
        for number in run:
            starts[number] = size + held[number].ctypes.data - first
        size += -(-sum(held[number].size for number in run) // _ALIGN) * _ALIGN
    there = _empty(size, device)
    packed = None
    for run in runs:
        first, nbytes = held[run[0]].ctypes.data, sum(held[number].size for number in run)
        if not nbytes:
            continue
        source = torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(first)))
        if device.type == "cuda" and not source.is_pinned():
            packed = torch.empty(size, dtype=torch.uint8, pin_memory=True) if packed is None else packed
            part = packed[starts[run[0]] :][:nbytes]
            part.copy_(source)
            source = part
        _copy(there[starts[run[0]] :][:nbytes], source)
    return starts, there, packed


def decode(
    blobs: Sequence[Sequence[Buffer]], into: Sequence[torch.Tensor], mode: Mode, codec: ctypes.CDLL, *,
    first_layer: int = 0, profile: NativeProfile | None = None, workspace: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fill each of `into`, in the form of `encode`, from streams in host memory, one for each of its layers.

    All have one mode, one of DECODES; first_layer, profile: as in `streams.decode`. Raises CorruptBlobError, with the
    first problem and its place; UnreadableBlobError without the right profile. Waits for the device.
    """
    launch = decoding(blobs, into, mode, codec, workspace, first_layer=first_layer, profile=profile)
    launch.run()
    streams.check(launch.jobs())


def in_groups(kvs: Sequence[torch.Tensor], run: Callable[[list[int]], list[T] | None]) -> list[T]:
    """Call `run` for each group of equal shape, dtype and device; return its results in order."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, kv in enumerate(kvs):
        alike.setdefault((kv.shape, kv.stride(), kv.dtype, kv.device), []).append(number)
    made = {number: one for group in alike.values() for number, one in zip(group, run(group) or (), strict=False)}
    return [made[number] for number in range(len(made))]


def at(place: Place | None) -> contextlib.AbstractContextManager[Any]:
    """On the stream of `place`, if it names one."""
    there = None if place is None or place.stream is None else device_of(place.device)
    return contextlib.nullcontext() if there is None or place is None else there.on(place.stream)


def _layer(kv: torch.Tensor, layer: int) -> int:
    streams.check_layout(kv)
    return kv.data_ptr() + layer * kv.stride(1) * kv.element_size()


def _empty(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 `[nbytes]` on the device, for work on the current stream."""
    its = device_of(device)
    return torch.empty(nbytes, dtype=torch.uint8, device=device) if its is None else its.empty(nbytes)


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """From host memory, which has to be kept until it is done, to the device."""
    its = device_of(to.device)
    if its is None:
        to.copy_(source)
    else:
        its.copy(to, source)


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
