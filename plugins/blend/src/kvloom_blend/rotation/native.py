"""The way into the libraries of this plugin: K of layers as addresses and strides. See csrc/rotate.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kvloom import PluginError
from kvloom import native as libraries
from kvloom.device import stream_of_launch

Rows = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BYTES_OF_A_THREAD = 1 << 20
"""Less is not worth a thread of its own."""
_LONGEST_WORD = 16
_BLOCKS = 4096
"""Thread blocks: enough to keep a GPU's memory busy."""


class Turn(NamedTuple):
    """From one position to another, of each token: float32 `[tokens, pairs]` each, on the device of K."""

    cos: Tensor
    sin: Tensor


class RotatedDims(Protocol):
    """The dims of each head that are rotated: `2 * pairs` of `head_size`, from `start`."""

    @property
    def head_size(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def pairs(self) -> int: ...
    @property
    def interleaved(self) -> bool: ...


class _Rotate(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("layers", "cos", "sin")),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("count", "dtype", "heads", "head_size", "start", "pairs", "interleaved")),
    ]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The build for CUDA."""

    library: ctypes.CDLL
    device_type: str = "cuda"
    """The device of K: `cpu` where tests run the kernel on a processor."""

    def queue(self, call: _Rotate, *, width: int, device: torch.device) -> None:
        """On the device's current stream."""
        with stream_of_launch(device) as stream:
            error = self.library.kvr_cuda_rotate(ctypes.byref(call), width, _BLOCKS, ctypes.c_void_p(stream))
        if error:
            raise RuntimeError(f"CUDA error {-error}" if error < 0 else "the kernel refused K that was checked")


@cache
def processor() -> ctypes.CDLL | None:
    """The build for processors, or None where there was no compiler."""
    try:
        return libraries.load("kvloom_blend", "kvrotate")
    except PluginError:
        return None


@cache
def kernels() -> Kernels | None:
    """The kernel, or None where the plugin was built without it, or there is no device."""
    try:
        library = libraries.load("kvloom_blend", "kvrotate_cuda")
    except PluginError:
        return None
    return Kernels(library) if library.kvr_cuda_devices() > 0 else None


def rotate(rotation: RotatedDims, turn: Turn, ks: Sequence[Tensor], outs: Sequence[Tensor]) -> bool:
    """Rotate K of layers `[tokens, heads * head_size]`, of one shape and dtype, into `outs`, which may be the same.

    Returns False, with nothing done, if there is no library for them; then torch does it. Work on a GPU is queued.
    """
    first = ks[0]
    contiguous = all(each.stride(1) == 1 or each.shape[1] == 1 for each in (*ks, *outs))
    if first.dtype not in _DTYPES or not contiguous or not first.numel():
        return False
    cos, sin = turn.cos.contiguous(), turn.sin.contiguous()
    rows = _rows(ks, outs)
    call = _Rotate(
        rows.ctypes.data, cos.data_ptr(), sin.data_ptr(), len(first), len(ks), _DTYPES[first.dtype],
        first.shape[1] // rotation.head_size, rotation.head_size, rotation.start, rotation.pairs, rotation.interleaved,
    )  # fmt: skip
    found = kernels()
    if found is not None and first.device.type == found.device_type:
        tables = cos.data_ptr() | sin.data_ptr()
        found.queue(call, width=width(rotation, rows, first.element_size(), tables), device=first.device)
        return True
    library = processor()
    if library is None or first.device.type != "cpu":
        return False
    threads = max(1, min(torch.get_num_threads(), len(ks) * first.nbytes // _BYTES_OF_A_THREAD))
    if library.kvr_rotate(ctypes.byref(call), threads, 0):
        raise RuntimeError("kvr_rotate refused K that was checked")
    return True


def width(rotation: RotatedDims, rows: Rows, element_size: int, tables: int = 0) -> int:
    """The number of elements that the kernel can process at a time: the largest power of two that divides all sizes and
    addresses.

    tables: the bits of the addresses of cosines and sines.
    """
    dims = rotation.start | rotation.pairs | rotation.head_size | tables // 4
    bits = int(np.bitwise_or.reduce(rows, axis=None)) | dims * element_size | _LONGEST_WORD
    return (bits & -bits) // element_size


def _rows(ks: Sequence[Tensor], outs: Sequence[Tensor]) -> Rows:
    """int64 `[layers, 4]`: addresses of source and target, and their tokens' strides in bytes."""
    size = ks[0].element_size()
    return np.array(
        [
            (k.data_ptr(), out.data_ptr(), k.stride(0) * size, out.stride(0) * size)
            for k, out in zip(ks, outs, strict=True)
        ],
        dtype=np.int64,
    )
