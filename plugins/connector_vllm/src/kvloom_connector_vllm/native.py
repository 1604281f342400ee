"""The way into the libraries of this plugin: a move as addresses and strides. See csrc/paged.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from kvloom import PluginError
from kvloom import native as libraries

from .paged.move import Move

_BYTES_OF_A_THREAD = 1 << 20
"""Less is not worth a thread of its own."""
_LONGEST_WORD = 16


class _Move(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pages", "chunks", "slots", "chunk_of")),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("planes", "layers", "heads", "head_bytes", "block_size", "to_pages")),
    ]


@dataclass(frozen=True, slots=True)
class Tables:
    """A move as the libraries read it."""

    move: Move
    chunks: np.ndarray[Any, Any]
    """int64 `[chunks, 4]`: address, strides of plane and layer in bytes, the first of its tokens."""
    chunk_of: np.ndarray[Any, Any]
    """int32 `[tokens]`"""

    @classmethod
    def of(cls, move: Move, address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr) -> Tables:
        """address: of a chunk, where the device has it under another."""
        rows, counts, first = [], [], 0
        for chunk in move.chunks:
            plane, layer, *_ = chunk.stride()
            size, tokens = chunk.element_size(), chunk.shape[2]
            rows.append((address(chunk), plane * size, layer * size, first))
            counts.append(tokens)
            first += tokens
        return cls(move, np.array(rows, dtype=np.int64), np.repeat(np.arange(len(rows), dtype=np.int32), counts))

    @property
    def nbytes(self) -> int:
        """Size of the KV if no slot is skipped."""
        pages = self.move.pages
        return len(self.move.slots) * pages.planes * pages.layers * pages.heads * pages.head_bytes

    @property
    def word(self) -> int:
        """Number of bytes that can be copied at a time: the largest power of two that divides every
        address and stride."""
        chunks = int(np.bitwise_or.reduce(self.chunks[:, :3], axis=None))
        bits = self.move.pages.bits | chunks | self.move.pages.head_bytes | _LONGEST_WORD
        return bits & -bits

    def arrays(self) -> tuple[np.ndarray[Any, Any], ...]:
        return self.move.pages.rows, self.chunks, self.move.slots, self.chunk_of

    def native(self, addresses: Sequence[int]) -> _Move:
        """The library's structure. addresses: those of `arrays`."""
        pages = self.move.pages
        return _Move(
            *addresses, len(self.move.slots), pages.planes, pages.layers, pages.heads, pages.head_bytes,
            pages.block_size, self.move.to_pages,
        )  # fmt: skip


@cache
def processor() -> ctypes.CDLL | None:
    """The build for processors, or None where there was no compiler."""
    try:
        return libraries.load("kvloom_connector_vllm", "kvpaged")
    except PluginError:
        return None


def on_processor(move: Move, native: ctypes.CDLL) -> None:
    """Copy, all of it in host memory; done on return."""
    tables = Tables.of(move)
    threads = max(1, min(torch.get_num_threads(), tables.nbytes // _BYTES_OF_A_THREAD))
    taken = tables.native([array.ctypes.data for array in tables.arrays()])
    if native.kvp_move(ctypes.byref(taken), threads):
        raise RuntimeError("kvp_move refused a move that was checked")


def copy_blocks(
    native: ctypes.CDLL, pages: np.ndarray[Any, Any], chunks: np.ndarray[Any, Any], blocks: np.ndarray[Any, Any], *,
    width: int, to_pages: bool,
) -> None:  # fmt: skip
    """Copy whole blocks of several layers, all in host memory; done on return. Addresses are not looked at.

    pages: int64 `[layers, 4]`: address, stride of a block, 0, 0. chunks: int64 `[blocks, 4]`, of each block: address,
    0, stride of a layer, its number. blocks: int64, which one of the pages' each is. width: bytes of one in one layer.
    """
    each = np.arange(len(blocks), dtype=np.int32)
    addresses = [array.ctypes.data for array in (pages, chunks, blocks, each)]
    threads = max(1, min(torch.get_num_threads(), len(blocks) * len(pages) * width // _BYTES_OF_A_THREAD))
    if native.kvp_move(ctypes.byref(_Move(*addresses, len(blocks), 1, len(pages), 1, width, 1, to_pages)), threads):
        raise RuntimeError("kvp_move refused a move that was checked")


@dataclass(frozen=True, slots=True)
class Kernels:
    """The build for CUDA."""

    library: ctypes.CDLL
    device_type: str = "cuda"
    """The device of the pages: `cpu` where tests run the kernels on a processor."""

    @classmethod
    def declared(cls, library: ctypes.CDLL, device_type: str = "cuda") -> Kernels:
        library.kvp_cuda_address.restype = ctypes.c_void_p
        library.kvp_cuda_address.argtypes = [ctypes.c_void_p]
        return cls(library, device_type)

    def address(self, tensor: torch.Tensor) -> int | None:
        """Under which the device has the tensor's memory; None if it has not, or not to its end."""
        first = tensor.data_ptr()
        last = (
            first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) * tensor.element_size()
        )
        there = [self.library.kvp_cuda_address(place) for place in (first, last)]
        return there[0] if None not in there and there[1] - there[0] == last - first else None

    def queue(self, move: _Move, *, word: int, blocks: int, stream: int) -> None:
        """Put a launch on a stream. Every address of `move` is the device's."""
        error = self.library.kvp_cuda_move(ctypes.byref(move), word, blocks, ctypes.c_void_p(stream))
        if error:
            raise RuntimeError(f"CUDA error {-error}" if error < 0 else "the kernel refused a move that was checked")


@cache
def kernels() -> Kernels | None:
    """The kernels, or None where the plugin was built without them, or there is no device."""
    try:
        library = libraries.load("kvloom_connector_vllm", "kvpaged_cuda")
    except PluginError:
        return None
    return Kernels.declared(library) if library.kvp_cuda_devices() > 0 else None


def about_kernels() -> str:
    """The reason why there are no kernels, for people."""
    try:
        devices = libraries.load("kvloom_connector_vllm", "kvpaged_cuda").kvp_cuda_devices()
    except PluginError:
        return "built without CUDA"
    return f"built with CUDA, {devices} devices" if devices >= 0 else f"built with CUDA, no driver (error {-devices})"
