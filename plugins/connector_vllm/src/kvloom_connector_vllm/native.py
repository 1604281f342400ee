"""The way into the libraries of this plugin: a move as addresses and strides. See csrc/paged.h."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from kvloom import PluginError
from kvloom import native as libraries
from kvloom.device import stream_of_launch

from .paged.bounce import room_of
from .paged.move import Move
from .paged.slots import Slots
from .paged.table import PageTable

_BYTES_OF_A_THREAD = 1 << 20
"""Less is not worth a thread of its own."""
_LONGEST_WORD = 16
_ALIGN = 16
_THREAD_BLOCKS = 1024
"""The most that a launch has; enough for the bandwidth of a device's memory."""


class _Move(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pages", "chunks", "slots", "chunk_of")),
        *((name, ctypes.c_int64) for name in ("chunks_at", "begin", "tokens")),
        *((name, ctypes.c_int32) for name in ("planes", "layers", "heads", "head_bytes", "block_size", "to_pages")),
        *((name, ctypes.c_int32) for name in ("first_layer", "all_layers")),
    ]


@dataclass(frozen=True, slots=True)
class Tables:
    """A move as the libraries read it: addresses, and strides in bytes."""

    pages: np.ndarray[Any, Any]
    """int64 `[planes x all layers, 4]`: address, strides of block, slot and head."""
    chunks: np.ndarray[Any, Any]
    """int64 `[chunks, 4]`: address less `chunks_at`, strides of plane and layer, the first of its tokens."""
    slots: np.ndarray[Any, Any]
    """int64 `[tokens]`; a negative one is skipped."""
    chunk_of: np.ndarray[Any, Any]
    """int32 `[tokens]`"""
    planes: int
    layers: int
    """The number of those that are moved."""
    heads: int
    head_bytes: int
    block_size: int
    to_pages: bool
    first_layer: int = 0
    """The first of those."""
    chunks_at: int = 0
    begin: int = 0
    """The first of the tokens that are moved."""
    tokens: int = -1
    """The number of those; -1: all."""
    _there: list[_There] = field(default_factory=list)
    """The same for all parts of a move."""

    @classmethod
    def of(cls, move: Move) -> Tables:
        """A move to or from chunks where they are."""
        rows, counts, first = [], [], 0
        for chunk in move.chunks:
            (plane, layer, *_), size, tokens = chunk.stride(), chunk.element_size(), chunk.shape[2]
            rows.append((chunk.data_ptr(), plane * size, layer * size, first))
            counts.append(tokens)
            first += tokens
        return cls._of(move.pages, np.array(rows, dtype=np.int64), move.slots, counts, to_pages=move.to_pages)

    @classmethod
    def buffered(
        cls, pages: PageTable, slots: Slots, counts: Sequence[int], *, to_pages: bool, by_layer: bool = False
    ) -> Tables:
        """A move in parts, by way of the buffers that `part` will be told of, which hold chunks one after another.

        counts: tokens of each chunk. by_layer: a buffer has one layer of its chunks; `layer` says which.
        """
        tokens = np.asarray(counts, dtype=np.int64)
        layer = tokens * (pages.heads * pages.head_bytes)
        plane = layer * (1 if by_layer else pages.layers)
        rows = np.empty((len(tokens), 4), dtype=np.int64)
        rows[:, 0] = _before(room_of(plane * pages.planes))
        rows[:, 1], rows[:, 2], rows[:, 3] = plane, 0 if by_layer else layer, _before(tokens)
        return cls._of(pages, rows, slots, tokens, to_pages=to_pages)

    @classmethod
    def _of(
        cls, pages: PageTable, chunks: np.ndarray[Any, Any], slots: Slots, counts: Any, *, to_pages: bool
    ) -> Tables:
        return cls(
            pages.rows, chunks, slots, np.repeat(np.arange(len(chunks), dtype=np.int32), counts),
            pages.planes, pages.layers, pages.heads, pages.head_bytes, pages.block_size, to_pages,
        )  # fmt: skip

    def layer(self, layer: int) -> Tables:
        """The move of one layer."""
        return replace(self, first_layer=layer, layers=1)

    def part(self, first: int, buffers: Sequence[torch.Tensor]) -> Tables:
        """The move of these buffers, one after another as `BounceBuffers` has them, of the chunks from `first` on."""
        end = first + len(buffers)
        begin, until = (
            int(self.chunks[first, 3]),
            int(self.chunks[end, 3]) if end < len(self.chunks) else len(self.slots),
        )
        at = buffers[0].data_ptr() - int(self.chunks[first, 0])
        return replace(self, chunks_at=at, begin=begin, tokens=until - begin)

    @classmethod
    def of_blocks(
        cls, pages: np.ndarray[Any, Any], chunks: np.ndarray[Any, Any], blocks: np.ndarray[Any, Any], *,
        width: int, to_pages: bool,
    ) -> Tables:  # fmt: skip
        """A move of whole blocks of several layers.

        pages: int64 `[layers, 4]`: address, stride of a block, 0, 0. chunks: int64 `[blocks, 4]`, of each block:
        address, 0, stride of a layer, its number. blocks: int64, which one of the pages' each is. width: bytes of one
        in one layer.
        """
        each = np.arange(len(blocks), dtype=np.int32)
        return cls(pages, chunks, blocks, each, 1, len(pages), 1, width, 1, to_pages)

    @property
    def nbytes(self) -> int:
        """Size of the KV if no slot is skipped."""
        return self.count * self.planes * self.layers * self.heads * self.head_bytes

    @property
    def count(self) -> int:
        """The number of tokens that are moved."""
        return len(self.slots) if self.tokens < 0 else self.tokens

    @property
    def bits(self) -> int:
        """Those that are set in some address or stride."""
        strides = (int(np.bitwise_or.reduce(rows, axis=None)) for rows in (self.pages, self.chunks[:, :3]))
        return functools.reduce(int.__or__, strides, self.head_bytes)

    def arrays(self) -> tuple[np.ndarray[Any, Any], ...]:
        return self.pages, self.chunks, self.slots, self.chunk_of

    def native(self, addresses: Sequence[int]) -> _Move:
        """The library's structure. addresses: those of `arrays`."""
        return _Move(
            *addresses, self.chunks_at, self.begin, self.count, self.planes, self.layers, self.heads, self.head_bytes,
            self.block_size, self.to_pages, self.first_layer, len(self.pages) // max(1, self.planes),
        )  # fmt: skip


def _before(sizes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The sum of all that come before each."""
    before: np.ndarray[Any, Any] = np.cumsum(sizes) - sizes
    return before


@cache
def processor() -> ctypes.CDLL | None:
    """The build for processors, or None where there was no compiler."""
    try:
        return libraries.load("kvloom_connector_vllm", "kvpaged")
    except PluginError:
        return None


def on_processor(tables: Tables, native: ctypes.CDLL) -> None:
    """Copy, all of it in host memory; done on return. Addresses are not looked at."""
    threads = max(1, min(torch.get_num_threads(), tables.nbytes // _BYTES_OF_A_THREAD))
    taken = tables.native([array.ctypes.data for array in tables.arrays()])
    if native.kvp_move(ctypes.byref(taken), threads):
        raise RuntimeError("kvp_move refused a move that was checked")


@dataclass(frozen=True, slots=True)
class _There:
    """Tables on a device."""

    packed: torch.Tensor
    """In pinned memory."""
    copied: torch.Tensor
    addresses: list[int]
    """Length of each array."""
    bits: int
    """See `Tables.bits`."""


def word_of(bits: int) -> int:
    """Number of bytes that can be copied at a time: the largest power of two that divides every address and stride."""
    bits |= _LONGEST_WORD
    return bits & -bits


@dataclass(frozen=True, slots=True)
class Kernels:
    """The build for CUDA."""

    library: ctypes.CDLL
    device_type: str = "cuda"
    """The device of the pages: `cpu` where tests run the kernels on a processor."""

    def launch(self, tables: Tables) -> object:
        """Queue a move within the current device's memory on its current stream. Keep the returned object until the
        move is done. Parts of a move have to be on one stream: the first takes the tables there."""
        first = not tables._there
        if first:
            tables._there.append(self._placed(tables))
        there = tables._there[0]
        taken, nbytes = tables.native(there.addresses), there.packed.numel() if first else 0
        with stream_of_launch(there.copied.device) as stream:
            error = self.library.kvp_cuda_move(
                ctypes.byref(taken), word_of(there.bits | tables.chunks_at), _THREAD_BLOCKS,
                ctypes.c_void_p(there.packed.data_ptr()), ctypes.c_void_p(there.copied.data_ptr()),
                ctypes.c_int64(nbytes), ctypes.c_void_p(stream),
            )  # fmt: skip
        if error:
            raise RuntimeError(f"CUDA error {-error}" if error < 0 else "the kernel refused a move that was checked")
        return there

    def _placed(self, tables: Tables) -> _There:
        arrays = tables.arrays()
        starts = [0, *itertools.accumulate(-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays)]
        packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self.device_type == "cuda")
        memory = packed.numpy()
        for start, array in zip(starts, arrays, strict=False):
            memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        # Free when the move is: torch gives it to nobody before what is on the same stream is done.
        copied = torch.empty_like(packed, device=self.device_type, pin_memory=False)
        return _There(packed, copied, [copied.data_ptr() + start for start in starts[:-1]], tables.bits)


@cache
def kernels() -> Kernels | None:
    """The kernels, or None where the plugin was built without them, or there is no device."""
    try:
        library = libraries.load("kvloom_connector_vllm", "kvpaged_cuda")
    except PluginError:
        return None
    return Kernels(library) if library.kvp_cuda_devices() > 0 else None


def runner(device: torch.device) -> Callable[[Tables], object] | None:
    """The function that moves KV within the memory of such a device; None if nothing was built for it.

    On a processor it is done on return; else the move is queued, as by `Kernels.launch`.
    """
    if device.type == "cuda":
        found = kernels()
        return None if found is None else found.launch
    library = processor() if device.type == "cpu" else None
    return None if library is None else functools.partial(on_processor, native=library)


def about_kernels() -> str:
    """The reason why there are no kernels, for people."""
    try:
        library = libraries.load("kvloom_connector_vllm", "kvpaged_cuda")
    except PluginError:
        return "built without CUDA"
    return libraries.about_devices(library.kvp_cuda_devices())
