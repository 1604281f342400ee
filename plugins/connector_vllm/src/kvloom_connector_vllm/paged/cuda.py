"""`type: paged_cuda`: the pages of a GPU by one kernel over all layers and segments, on streams of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from kvloom import ConfigError, Fence, KVSpec
from kvloom.device import device_of, is_stream

from ..native import Kernels, Tables, about_kernels, kernels
from .bounce import BounceBuffers, mark
from .connector import PagedConnector
from .move import Move
from .settings import PagedCudaConfig
from .slots import Slots
from .table import PageTable


class PagedCudaConnector(PagedConnector):
    """`PagedConnector` for KV in the memory of a GPU; the processor only queues kernels and copies.

    `where`: that of `paged`, and `stream`: the torch stream on which the engine computes, if it is not the calling
    thread's current one. Work queued on it before a call is done before KV is moved; `ready`, an event, in its place.

    KV is gathered in buffers on the device and copied from there, whole chunks at a time: the bus is then as fast as
    for one large copy, and the model keeps its multiprocessors.

    Its keys are those of `paged`, which an index in a process without a GPU can name instead.
    """

    type = "paged_cuda"
    takes = PagedConnector.takes | {"stream", "ready"}

    Config = PagedCudaConfig
    config: PagedCudaConfig

    def __init__(self, config: PagedCudaConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        found = kernels()
        if found is None:
            raise ConfigError("connector.type", f"paged_cuda needs a GPU ({about_kernels()}); use type: paged")
        self._kernels: Kernels = found
        self._buffers: dict[torch.device, BounceBuffers] = {}

    def close(self) -> None:
        for buffers in [*self._buffers.values()]:
            buffers.close()
        self._buffers.clear()

    def ordered(self, where: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"ready": mark(self._pages(where).device, where.get("stream")), **where}

    def _pages(self, where: Mapping[str, Any], layer: int | None = None) -> PageTable:
        stream = where.get("stream")
        if stream is not None and not is_stream(stream):
            raise ValueError(f"stream: expected a torch.cuda.Stream, got {type(stream).__name__}")
        pages = super()._pages(where, layer)
        if pages.device.type != self._kernels.device_type:
            raise ValueError(f"kvcaches: on {pages.device}; paged_cuda takes those of a GPU, paged takes any")
        return pages

    def _slots(self, where: Mapping[str, Any], num_tokens: int, pages: PageTable) -> Slots:
        stream, device = where.get("stream"), device_of(pages.device)
        with (  # the table may be being written
            contextlib.nullcontext() if stream is None or device is None else device.on(stream)
        ):
            return super()._slots(where, num_tokens, pages)

    def _copy(self, move: Move, where: Mapping[str, Any], layer: int | None) -> Fence:
        device = move.pages.device
        bounce = self._buffers.get(device) or self._buffers.setdefault(device, self._made(device))
        counts = [chunk.shape[2] for chunk in move.chunks]
        tables = Tables.buffered(move.pages, move.slots, counts, to_pages=move.to_pages)

        def near(first: int, buffers: Sequence[torch.Tensor]) -> object:
            return bounce.device.queue(partial(self._kernels.launch, tables.part(first, buffers)))

        go = bounce.write if move.to_pages else bounce.read
        ready = where.get("ready")
        return go(move.chunks, near, mark(device, where.get("stream")) if ready is None else ready)

    def _made(self, where: torch.device) -> BounceBuffers:
        device = device_of(where)
        assert device is not None, "checked: it is that of the kernels"
        return BounceBuffers(device, self.config.staging)
