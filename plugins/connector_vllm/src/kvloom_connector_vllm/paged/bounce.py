"""Chunks to and from a device by way of buffers there: pages move within the device, whole chunks over the bus."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

log = logging.getLogger(__name__)

_PORTABLE = 1
"""cudaHostRegisterPortable: for every context of the process."""
_ALIGN = 256
"""Chunks begin at multiples of it in a buffer, in bytes."""

Near = Callable[[int, Sequence[torch.Tensor]], None]
"""Queue, on the current stream, what moves KV between the pages and buffers of the chunks from this number on."""


class Queued:
    """The fence of work queued on a stream; without an event it is done."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class BounceBuffers:
    """Two buffers for each direction on one device; while one is filled, the other is emptied.

    Scattered pages are collected within the device, which takes 3 % of the time of the bus, and copied over it by copy
    engines, whole chunks at a time. Kernels that reach over the bus themselves are slower and take multiprocessors away
    from the model; copy engines that are given single pages are slower too (docs/design).

    Threads may share one: their moves are queued one after another.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        """nbytes: of a direction's two buffers together; a buffer holds one chunk at least."""
        self._out, self._in = _Way(device, nbytes), _Way(device, nbytes)

    def read(self, chunks: Sequence[torch.Tensor], gather: Near, ready: torch.cuda.Event | None) -> Queued:
        """From pages into chunks. ready: comes before; None on a processor."""
        with self._out.going_on(ready) as way:
            for first, some in _parts(chunks, way.size_for(chunks)):
                buffers = way.take(some, for_stream=way.near)
                with _on(way.near):
                    gather(first, buffers)
                _wait(way.bus, _mark(way.near))
                with _on(way.bus):
                    for chunk, buffer in zip(some, buffers, strict=True):
                        _copy_runs(chunk, buffer)
                way.give(_mark(way.bus))
            return Queued(_mark(way.bus))

    def write(self, chunks: Sequence[torch.Tensor], scatter: Near, ready: torch.cuda.Event | None) -> Queued:
        """From chunks into pages. ready: as in `read`."""
        with self._in.going_on(ready) as way:
            for first, some in _parts(chunks, way.size_for(chunks)):
                buffers = way.take(some, for_stream=way.bus)
                with _on(way.bus):
                    for chunk, buffer in zip(some, buffers, strict=True):
                        _copy_runs(buffer, chunk)
                _wait(way.near, _mark(way.bus))
                with _on(way.near):
                    scatter(first, buffers)
                way.give(_mark(way.near))
            return Queued(_mark(way.near))


def mark(device: torch.device, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event | None:
    """An event after everything queued so far on the stream, by default the calling thread's; None on a processor."""
    if device.type != "cuda":
        return None
    return (torch.cuda.current_stream(device) if stream is None else stream).record_event()


def pin(memory: torch.Tensor) -> bool:
    """Page-lock host memory that lasts, so that copies to and from it are asynchronous; whether that was possible."""
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
    if error:
        log.warning("%d bytes could not be pinned (CUDA error %d): copies are slower", memory.nbytes, error)
    return not error


def unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class _Way:
    """A direction: a stream for work within the device, one for the bus, and two buffers. No streams on a processor."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device, self._half = device, nbytes // 2
        self._lock = threading.Lock()
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._free: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        cuda = device.type == "cuda"
        self.near, self.bus = (torch.cuda.Stream(device) if cuda else None for _ in range(2))

    @contextlib.contextmanager
    def going_on(self, ready: torch.cuda.Event | None) -> Iterator[_Way]:
        """One thread at a time. After an error nothing is under way any more: who called takes the chunks back."""
        with self._lock:
            try:
                _wait(self.near, ready)
                yield self
            except BaseException:
                self._synchronize()
                raise

    def size_for(self, chunks: Sequence[torch.Tensor]) -> int:
        """Bytes of a buffer for these chunks."""
        return max(self._half, *(_room(chunk) for chunk in chunks))

    def take(self, chunks: Sequence[torch.Tensor], *, for_stream: torch.cuda.Stream | None) -> list[torch.Tensor]:
        """The next buffer, divided among chunks; what is queued on that stream waits until it is free."""
        nbytes, held = sum(map(_room, chunks)), self._buffers[self._turn]
        if held is None or held.numel() < nbytes:
            self._synchronize()  # torch gives the old one to others at once
            self._buffers[self._turn] = None
            held = self._buffers[self._turn] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        elif (event := self._free[self._turn]) is not None:
            _wait(for_stream, event)
        parts, at = [], 0
        for chunk in chunks:
            size = chunk.numel() * chunk.element_size()
            parts.append(held[at : at + size].view(chunk.dtype).view(chunk.shape))
            at += _room(chunk)
        return parts

    def give(self, event: torch.cuda.Event | None) -> None:
        """The buffer taken last is free after that event."""
        self._free[self._turn] = event
        self._turn = 1 - self._turn

    def _synchronize(self) -> None:
        for stream in (self.near, self.bus):
            if stream is not None:
                stream.synchronize()


def _room(chunk: torch.Tensor) -> int:
    """Bytes that a chunk takes in a buffer."""
    return -(-chunk.numel() * chunk.element_size() // _ALIGN) * _ALIGN


def _parts(chunks: Sequence[torch.Tensor], size: int) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
    """Chunks that fit into a buffer together, and the number of the first."""
    first, used = 0, 0
    for number, chunk in enumerate(chunks):
        if number > first and used + _room(chunk) > size:
            yield first, chunks[first:number]
            first, used = number, 0
        used += _room(chunk)
    if first < len(chunks):
        yield first, chunks[first:]


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Its device becomes the thread's, too."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    return None if stream is None else stream.record_event()


def _wait(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)


def _copy_runs(to: torch.Tensor, source: torch.Tensor) -> None:
    """Queue copies of parts that are contiguous in both, because torch would copy other parts twice."""
    if to.is_contiguous() and source.is_contiguous():
        to.copy_(source, non_blocking=True)
    else:
        for one, other in zip(to, source, strict=True):
            _copy_runs(one, other)
