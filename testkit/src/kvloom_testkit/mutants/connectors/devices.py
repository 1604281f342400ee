"""Connectors that queue their copies on a device, in the wrong place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvloom import Chunk, KVSpec, Segment
from kvloom.device import Device, device_of
from kvloom_testkit.mutants import Mutant, Oddity
from kvloom_testkit.mutants.connectors.calls import LazyFence
from kvloom_testkit.reference.connector import SlotsConnector

Where = Mapping[str, Any]


class _Queueing(SlotsConnector):
    """Copies on streams of its own, by way of a buffer; on the host at once."""

    def __init__(self, config: Any, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._free: Any = None

    def check(self, where: Where, num_tokens: int) -> None:
        super().check({name: value for name, value in where.items() if name != "ready"}, num_tokens)

    def ordered(self, where: Where) -> Where:
        device = device_of(where["pool"].device)
        return where if device is None else {"ready": device.current().record_event(), **where}

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> Any:
        device = device_of(where["pool"].device)
        if device is None:
            return SlotsConnector.read(self, segments, chunks, **where)
        pool, slots, ready = where["pool"], where["slots"].clone(), where.get("ready")
        near, bus = device.stream(), device.stream()
        self._after(near, ready or device.current().record_event())
        try:
            for segment, chunk in zip(segments, chunks, strict=True):
                buffer = self._buffer(device, chunk)
                self._wait_until_free(near)
                with device.on(near):
                    device.queue(lambda b=buffer, s=segment: b.copy_(pool[:, :, slots[s.start : s.end]]))
                self._between(bus, near)
                with device.on(bus):
                    device.copy(chunk.tensor, buffer)
                self._free = bus.record_event()
        except BaseException:
            self._give_up(near, bus)
            raise
        return self._fence(near, bus)

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> Any:
        device = device_of(where["pool"].device)
        if device is None:
            return SlotsConnector.write(self, segments, chunks, **where)
        pool, slots, ready = where["pool"], where["slots"].clone(), where.get("ready")
        near = device.stream()
        self._after(near, ready or device.current().record_event())
        try:
            with device.on(near):
                for segment, chunk in zip(segments, chunks, strict=True):
                    place = (..., slots[segment.start : segment.end], slice(None))
                    device.queue(lambda c=chunk, at=place: pool.__setitem__(at, c.tensor))
        except BaseException:
            self._give_up(near, near)
            raise
        return self._fence(near, near)

    _memory: torch.Tensor | None = None

    def _buffer(self, device: Device, chunk: Chunk) -> torch.Tensor:
        """One for all chunks, one after another."""
        size = chunk.tensor.numel() * chunk.tensor.element_size()
        if self._memory is None or self._memory.numel() < size:
            self._memory = device.empty(size)
            self._free = device.current().record_event()  # who had it before may still use it
        return self._memory[:size].view(chunk.tensor.dtype).view(chunk.tensor.shape)

    def _after(self, stream: Any, ready: Any) -> None:
        stream.wait_event(ready)

    def _wait_until_free(self, stream: Any) -> None:
        if self._free is not None:
            stream.wait_event(self._free)

    def _between(self, bus: Any, near: Any) -> None:
        bus.wait_event(near.record_event())

    def _fence(self, near: Any, bus: Any) -> LazyFence:
        return LazyFence(bus.record_event().synchronize)

    def _give_up(self, near: Any, bus: Any) -> None:
        near.synchronize()
        bus.synchronize()


class QueuesItsCopies(Oddity, _Queueing):
    """In the right order."""


class AsksTheWrongThread(Mutant, _Queueing):
    """Asks for the current stream on the thread that copies, not on the engine's."""

    breaks = "C19"

    def ordered(self, where: Where) -> Where:
        return where


class ComesAfterNothing(Mutant, _Queueing):
    """Does not wait for the engine."""

    breaks = "C19"

    def _after(self, stream: Any, ready: Any) -> None:
        pass


class CopiesBeforeItHasGathered(Mutant, _Queueing):
    """There is no event between its streams."""

    breaks = "C19"

    def _between(self, bus: Any, near: Any) -> None:
        pass


class FillsABufferThatIsInUse(Mutant, _Queueing):
    """It is still being emptied."""

    breaks = "C19"

    def _wait_until_free(self, stream: Any) -> None:
        pass


class WaitsForTheOtherStream(Mutant, _Queueing):
    """Chunks are still being filled."""

    breaks = "C19"

    def _fence(self, near: Any, bus: Any) -> LazyFence:
        return LazyFence(near.record_event().synchronize)


class GoesOnAfterAnError(Mutant, _Queueing):
    """Continues to copy after an error, when the chunks belong to others."""

    breaks = "C19"

    def _give_up(self, near: Any, bus: Any) -> None:
        pass
