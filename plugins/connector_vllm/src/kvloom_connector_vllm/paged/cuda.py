"""`type: paged_cuda`: the pages of a GPU by one kernel over all layers and segments, on a stream of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from kvloom import ConfigError, Fence, KVSpec

from ..native import Kernels, Tables, about_kernels, kernels
from .connector import PagedConnector
from .move import Move
from .settings import PagedCudaConfig
from .slots import Slots
from .table import PageTable

_BLOCKS = 64
"""Thread blocks of copies over the bus: enough to keep it busy; the model has the rest of the GPU."""
_BLOCKS_ON_DEVICE = 1024
"""Thread blocks of copies within the device."""
_ALIGN = 16


class Queued:
    """The fence of work queued on a stream; without an event it is done."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class PagedCudaConnector(PagedConnector):
    """`PagedConnector` for KV in the memory of a GPU; the processor only launches kernels.

    `where`: that of `paged`, and `stream`: the torch stream on which the engine computes, if it is not the calling
    thread's current one. Work queued on it before a call is done before KV is moved.

    Chunks in pinned memory are read and written by the kernel itself; with `use_gpu`, and for chunks elsewhere, KV is
    gathered in a buffer on the device, and copied from there.

    Its keys are those of `paged`, which an index in a process without a GPU can name instead.
    """

    type = "paged_cuda"
    takes = PagedConnector.takes | {"stream"}

    Config = PagedCudaConfig
    config: PagedCudaConfig

    def __init__(self, config: PagedCudaConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        found = kernels()
        if found is None:
            raise ConfigError("connector.type", f"paged_cuda needs a GPU ({about_kernels()}); use type: paged")
        self._kernels: Kernels = found
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def close(self) -> None:
        self._streams.clear()

    def _pages(self, where: Mapping[str, Any], layer: int | None = None) -> PageTable:
        stream = where.get("stream")
        if stream is not None and not isinstance(stream, torch.cuda.Stream):
            raise ValueError(f"stream: expected a torch.cuda.Stream, got {type(stream).__name__}")
        pages = super()._pages(where, layer)
        if pages.device.type != self._kernels.device_type:
            raise ValueError(f"kvcaches: on {pages.device}; paged_cuda takes those of a GPU, paged takes any")
        return pages

    def _slots(self, where: Mapping[str, Any], num_tokens: int, pages: PageTable) -> Slots:
        stream = where.get("stream")
        with (
            contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        ):  # the table may be being written
            return super()._slots(where, num_tokens, pages)

    def _copy(self, move: Move, where: Mapping[str, Any], layer: int | None) -> Fence:
        address = self._kernels.address
        device = move.pages.device
        with self._on_stream(device, where.get("stream")) as stream:
            if self.config.use_gpu or any(address(chunk) is None for chunk in move.chunks):
                for part in _parts(move, self.config.staging):
                    self._staged(part, stream)
            else:
                self._launch(Tables.of(move, lambda chunk: address(chunk) or 0), device, stream, blocks=_BLOCKS)
            event = None if stream is None else torch.cuda.Event()
            if event is not None:
                event.record(stream)
        return Queued(event)

    @contextlib.contextmanager
    def _on_stream(self, device: torch.device, engine: torch.cuda.Stream | None) -> Iterator[torch.cuda.Stream | None]:
        """This connector's stream, behind what the engine has queued by now; None where there are no streams."""
        if device.type != "cuda":
            yield None
            return
        if device not in self._streams:
            self._streams.setdefault(device, torch.cuda.Stream(device))
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device) if engine is None else engine)
        with torch.cuda.stream(stream):  # which makes its device the current one
            try:
                yield stream
            except BaseException:  # out of memory, say: who called takes the chunks back
                stream.synchronize()
                raise

    # These allocate on this stream: torch does not reuse the memory before the work queued there is done.

    def _staged(self, move: Move, stream: torch.cuda.Stream | None) -> None:
        """By way of a buffer on the device."""
        device = move.pages.device
        buffers = [torch.empty(chunk.shape, dtype=chunk.dtype, device=device) for chunk in move.chunks]
        if move.to_pages:
            for chunk, buffer in zip(move.chunks, buffers, strict=True):
                _copy_runs(buffer, chunk)
        near = Move(move.pages, move.slots, buffers, move.to_pages)
        self._launch(Tables.of(near), device, stream, blocks=_BLOCKS_ON_DEVICE)
        if not move.to_pages:
            for chunk, buffer in zip(move.chunks, buffers, strict=True):
                _copy_runs(chunk, buffer)

    def _launch(self, tables: Tables, device: torch.device, stream: torch.cuda.Stream | None, *, blocks: int) -> None:
        """Queue the kernel."""
        arrays = tables.arrays()
        starts = np.cumsum([0, *(-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays)])
        packed = torch.empty(int(starts[-1]), dtype=torch.uint8, pin_memory=stream is not None)
        for start, array in zip(starts, arrays, strict=False):
            packed.numpy()[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        there = packed.to(device, non_blocking=True)
        taken = tables.native([there.data_ptr() + int(start) for start in starts[:-1]])
        handle = 0 if stream is None else stream.cuda_stream
        self._kernels.queue(taken, word=tables.word, blocks=blocks, stream=handle)


def _parts(move: Move, most_bytes: int) -> Iterator[Move]:
    """The move in parts of at least one chunk, up to a maximum size."""
    first, at, taken, nbytes = 0, 0, 0, 0
    for number, chunk in enumerate([*move.chunks, None]):
        size = 0 if chunk is None else chunk.numel() * chunk.element_size()
        if number > first and (chunk is None or nbytes + size > most_bytes):
            yield Move(move.pages, move.slots[at : at + taken], move.chunks[first:number], move.to_pages)
            first, at, taken, nbytes = number, at + taken, 0, 0
        if chunk is not None:
            taken, nbytes = taken + chunk.shape[2], nbytes + size


def _copy_runs(to: torch.Tensor, source: torch.Tensor) -> None:
    """Queue copies of parts that are contiguous in both, because torch would copy other parts twice."""
    if to.is_contiguous() and source.is_contiguous():
        to.copy_(source, non_blocking=True)
    else:
        for one, other in zip(to, source, strict=True):
            _copy_runs(one, other)
