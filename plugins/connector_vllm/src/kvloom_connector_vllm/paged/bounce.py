"""Chunks to and from a device by way of buffers there: pages move within the device, whole chunks over the bus."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from kvloom.device import Device, Stream, StreamEvent, device_of

_ALIGN = 256
"""Chunks begin at multiples of it in a buffer, in bytes."""

Sizes = TypeVar("Sizes", int, "np.ndarray[Any, Any]")

Near = Callable[[int, Sequence[torch.Tensor]], object]
"""Queue, on the device's current stream, moves between the pages and buffers of the chunks from this number on. Returns
what has to be kept until they are done."""


class Queued:
    """The fence of work that ends with an event."""

    def __init__(self, event: StreamEvent, held: object = None) -> None:
        """held: what the work uses."""
        self._event, self._held = event, held

    def wait(self) -> None:
        self._event.synchronize()


class BounceBuffers:
    """Two buffers for each direction on one device; while one is filled, the other is emptied.

    Scattered pages are collected within the device, which takes 3 % of the time of the bus, and copied over it by copy
    engines, whole chunks at a time. Kernels that reach over the bus themselves are slower and take multiprocessors away
    from the model; copy engines that are given single pages are slower too (docs/design).

    Threads may share one: their moves are queued one after another.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        """nbytes: of a direction's two buffers together; a buffer holds one chunk at least."""
        self.device = device
        self._out, self._in = _Way(device, nbytes), _Way(device, nbytes)

    def read(self, chunks: Sequence[torch.Tensor], gather: Near, ready: StreamEvent | None = None) -> Queued:
        """From pages into chunks. ready: comes before; by default, everything on the thread's current stream.

        What is queued for each filling of a buffer: what `gather` queues, and one batch of copies.
        """
        with self._out.going_on(ready, chunks) as way:
            for first, some in _parts(chunks, way.size_for(chunks)):
                buffers = way.take(some, way.near)
                with self.device.on(way.near):
                    held = gather(first, buffers)
                way.bus.wait_event(way.near.record_event())
                way.copy(some, buffers)
                way.give(way.bus, held)
            return Queued(way.bus.record_event(), way)

    def write(self, chunks: Sequence[torch.Tensor], scatter: Near, ready: StreamEvent | None = None) -> Queued:
        """From chunks into pages. As `read`."""
        with self._in.going_on(ready, chunks) as way:
            self._write(way, chunks, scatter)
            return Queued(way.near.record_event(), way)

    def write_layers(
        self, chunks: Sequence[torch.Tensor], layers: Iterable[tuple[Sequence[torch.Tensor], Near]],
        there: Callable[[StreamEvent], None], ready: StreamEvent | None = None,
    ) -> Queued:  # fmt: skip
        """`write`, one layer of all chunks after another.

        layers: of each, the chunks' parts, and the function that queues moves of these. there: is given an event after
        which the layer is in the pages, as soon as it is queued.
        """
        with self._in.going_on(ready, chunks) as way:
            for parts, scatter in layers:
                self._write(way, parts, scatter)
                there(way.near.record_event())
            return Queued(way.near.record_event(), way)

    def _write(self, way: _Way, chunks: Sequence[torch.Tensor], scatter: Near) -> None:
        for first, some in _parts(chunks, way.size_for(chunks)):
            buffers = way.take(some, way.bus)
            way.copy(buffers, some)
            way.near.wait_event(way.bus.record_event())
            with self.device.on(way.near):
                held = scatter(first, buffers)
            way.give(way.near, held)

    def close(self) -> None:
        """Wait until nothing uses the buffers."""
        self._out.settle()
        self._in.settle()


class _Way:
    """A direction: a stream for work within the device, one for the bus, and two buffers."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self._half = device, nbytes // 2
        self._lock = threading.Lock()
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._free: list[StreamEvent | None] = [None, None]
        self._held: deque[tuple[StreamEvent, object]] = deque()
        self._turn = 0
        self.near, self.bus = device.stream(), device.stream()

    @contextlib.contextmanager
    def going_on(self, ready: StreamEvent | None, chunks: Sequence[torch.Tensor]) -> Iterator[_Way]:
        """One thread at a time. After an error nothing is under way any more: who called takes the chunks back."""
        with self._lock:
            while self._held and self._held[0][0].query():
                self._held.popleft()
            # Chunks on the device may have been made by what is queued now. Those of the host need not wait for a step.
            on_device = any(map(self._device.holds, chunks))
            now = self._device.current().record_event() if ready is None or on_device else None
            if on_device:
                self.bus.wait_event(now)
            self.near.wait_event(now if ready is None else ready)
            try:
                yield self
            except BaseException:
                self._synchronize()
                raise

    def size_for(self, chunks: Sequence[torch.Tensor]) -> int:
        """Bytes of a buffer for these chunks."""
        return max(self._half, *map(room, chunks)) if chunks else self._half

    def take(self, chunks: Sequence[torch.Tensor], stream: Stream) -> list[torch.Tensor]:
        """The next buffer, divided among chunks; what is queued on that stream from now on finds it free."""
        nbytes, held = sum(map(room, chunks)), self._buffers[self._turn]
        if held is None or held.numel() < nbytes:
            self._synchronize()  # others get the old one at once
            self._buffers[self._turn] = held = None
            with self._device.on(self.near):  # else what was freed on the engine's stream, and is in use there still
                held = self._buffers[self._turn] = self._device.empty(nbytes)
            stream.wait_event(self.near.record_event())
        elif (event := self._free[self._turn]) is not None:
            stream.wait_event(event)
        parts, at = [], 0
        for chunk in chunks:
            size = chunk.nbytes
            parts.append(held[at : at + size].view(chunk.dtype).view(chunk.shape))
            at += room(chunk)
        return parts

    def give(self, stream: Stream, held: object) -> None:
        """The buffer taken last is free once that stream has got so far, and nothing needs `held` any more."""
        event = self._free[self._turn] = stream.record_event()
        if held is not None:
            self._held.append((event, held))
        self._turn = 1 - self._turn

    def copy(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        with self._device.on(self.bus):
            self._device.copy_batch(to, source)

    def settle(self) -> None:
        with self._lock:
            self._synchronize()
            self._held.clear()

    def _synchronize(self) -> None:
        self.near.synchronize()
        self.bus.synchronize()


def mark(device: torch.device, stream: Stream | None = None) -> StreamEvent | None:
    """An event after everything queued so far on the stream, by default the thread's current one; None on the host."""
    if stream is not None:
        return stream.record_event()
    its = device_of(device)
    return None if its is None else its.current().record_event()


def room_of(nbytes: Sizes) -> Sizes:
    """Bytes that chunks of so many take in a buffer, in which they lie one after another."""
    return -(-nbytes // _ALIGN) * _ALIGN


def room(chunk: torch.Tensor) -> int:
    """Bytes that a chunk takes there."""
    return room_of(chunk.nbytes)


def _parts(chunks: Sequence[torch.Tensor], size: int) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
    """Chunks that fit into a buffer together, and the number of the first."""
    first, used = 0, 0
    for number, chunk in enumerate(chunks):
        if number > first and used + room(chunk) > size:
            yield first, chunks[first:number]
            first, used = number, 0
        used += room(chunk)
    if first < len(chunks):
        yield first, chunks[first:]
