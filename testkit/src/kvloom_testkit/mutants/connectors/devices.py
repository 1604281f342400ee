"""Connectors that queue their copies on a device, in the wrong place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
        device = self._device(where)
        return where if device is None else {"ready": device.current().record_event(), **where}

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> Any:
        device = self._device(where)
        if device is None:
            return SlotsConnector.read(self, segments, chunks, **where)
        near, bus = device.stream(), device.stream()
        self._before_reads(near, where.get("ready") or device.current().record_event())
        try:
            for number, (segment, chunk) in enumerate(zip(segments, chunks, strict=True)):
                with device.on(near):
                    buffer = self._buffer(device, chunk)
                    self._wait_until_emptied(near)
                    at = self._slots_there(device, where["slots"][segment.start : segment.end])
                    gather = partial(_gather, where["pool"], at, buffer)
                    device.queue(self._launch(("read", number), gather))
                self._before_the_bus(bus, near)
                with device.on(bus):
                    device.copy(chunk.tensor, buffer)
                self._free = bus.record_event()
                self._used(near)
        except BaseException:
            self._give_up(near, bus)
            raise
        return self._fence_of_reads(near, bus)

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> Any:
        device = self._device(where)
        if device is None:
            return SlotsConnector.write(self, segments, chunks, **where)
        near, bus = device.stream(), device.stream()
        self._before_writes(near, where.get("ready") or device.current().record_event())
        try:
            for number, (segment, chunk) in enumerate(zip(segments, chunks, strict=True)):
                with device.on(bus):
                    buffer = self._buffer(device, chunk)
                    self._wait_until_scattered(bus)
                    device.copy(buffer, chunk.tensor)
                self._after_the_bus(near, bus)
                with device.on(near):
                    at = self._slots_there(device, where["slots"][segment.start : segment.end])
                    scatter = partial(_scatter, where["pool"], at, buffer)
                    device.queue(self._launch(("write", number), scatter))
                self._free = near.record_event()
                self._used(bus)
        except BaseException:
            self._give_up(near, bus)
            raise
        return self._fence_of_writes(near, bus)

    _memory: torch.Tensor | None = None

    def _device(self, where: Where) -> Device | None:
        return device_of(where["pool"].device)

    def _buffer(self, device: Device, chunk: Chunk) -> torch.Tensor:
        """One for all chunks, one after another, taken on the current stream."""
        size = chunk.tensor.numel() * chunk.tensor.element_size()
        if self._memory is None or self._memory.numel() < size:
            self._drop()
            self._memory = device.empty(size)
            self._free = device.current().record_event()  # who had it before may still use it
        return self._memory[:size].view(chunk.tensor.dtype).view(chunk.tensor.shape)

    def _drop(self) -> None:
        if self._memory is not None:
            self._free.synchronize()
            self._memory = None

    def _slots_there(self, device: Device, slots: torch.Tensor) -> torch.Tensor:
        there = device.empty(slots.numel() * 8).view(torch.int64)
        device.copy(there, self._slots_here(slots))
        return there

    def _slots_here(self, slots: torch.Tensor) -> torch.Tensor:
        return slots.clone()

    def _launch(self, about: object, work: Callable[[], object]) -> Callable[[], object]:
        return work

    def _used(self, stream: Any) -> None:
        """The buffer is used by what was queued on that stream, and on the one of `_free`."""

    def _before_reads(self, near: Any, ready: Any) -> None:
        near.wait_event(ready)

    def _before_writes(self, near: Any, ready: Any) -> None:
        near.wait_event(ready)

    def _wait_until_emptied(self, near: Any) -> None:
        near.wait_event(self._free)

    def _wait_until_scattered(self, bus: Any) -> None:
        bus.wait_event(self._free)

    def _before_the_bus(self, bus: Any, near: Any) -> None:
        bus.wait_event(near.record_event())

    def _after_the_bus(self, near: Any, bus: Any) -> None:
        near.wait_event(bus.record_event())

    def _fence_of_reads(self, near: Any, bus: Any) -> LazyFence:
        return LazyFence(bus.record_event().synchronize)

    def _fence_of_writes(self, near: Any, bus: Any) -> LazyFence:
        return LazyFence(near.record_event().synchronize)

    def _give_up(self, near: Any, bus: Any) -> None:
        near.synchronize()
        bus.synchronize()


def _gather(pool: torch.Tensor, slots: torch.Tensor, buffer: torch.Tensor) -> None:
    buffer.copy_(pool[:, :, slots])


def _scatter(pool: torch.Tensor, slots: torch.Tensor, buffer: torch.Tensor) -> None:
    pool[:, :, slots] = buffer


class QueuesItsCopies(Oddity, _Queueing):
    """In the right order."""


class AsksTheWrongThread(Mutant, _Queueing):
    """Asks for the current stream on the thread that copies, not on the engine's."""

    breaks = "C19"

    def ordered(self, where: Where) -> Where:
        return where


class ReadsBeforeTheEngineHasWritten(Mutant, _Queueing):
    """Does not wait for it."""

    breaks = "C19"

    def _before_reads(self, near: Any, ready: Any) -> None:
        pass


class WritesBeforeTheEngineHasRead(Mutant, _Queueing):
    """Does not wait for it."""

    breaks = "C19"

    def _before_writes(self, near: Any, ready: Any) -> None:
        pass


class CopiesBeforeItHasGathered(Mutant, _Queueing):
    """There is no event between its streams."""

    breaks = "C19"

    def _before_the_bus(self, bus: Any, near: Any) -> None:
        pass


class ScattersBeforeItHasCopied(Mutant, _Queueing):
    """There is no event between its streams."""

    breaks = "C19"

    def _after_the_bus(self, near: Any, bus: Any) -> None:
        pass


class GathersIntoABufferThatIsInUse(Mutant, _Queueing):
    """It is still being emptied."""

    breaks = "C19"

    def _wait_until_emptied(self, near: Any) -> None:
        pass


class CopiesIntoABufferThatIsInUse(Mutant, _Queueing):
    """It is still being scattered."""

    breaks = "C19"

    def _wait_until_scattered(self, bus: Any) -> None:
        pass


class GivesABufferBackThatIsInUse(Mutant, _Queueing):
    """Takes a new one each time: others get the old one, and use it, before its copy ran."""

    breaks = "C19"

    def _used(self, stream: Any) -> None:
        self._memory = None


class FillsATableAgain(Mutant, _Queueing):
    """Takes a copy from memory that is not pinned to be done when the call returns."""

    breaks = "C19"

    def __init__(self, config: Any, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._table = torch.zeros(1 << 16, dtype=torch.int64)

    def _slots_here(self, slots: torch.Tensor) -> torch.Tensor:
        return self._table[: len(slots)].copy_(slots)


class ReplaysWhatItCaptured(Mutant, _Queueing):
    """The launches of its first call, with the arguments that they had, as a graph does."""

    breaks = "C19"

    def __init__(self, config: Any, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._captured: dict[object, Callable[[], object]] = {}

    def _launch(self, about: object, work: Callable[[], object]) -> Callable[[], object]:
        return self._captured.setdefault(about, work)


class WaitsForTheOtherStream(Mutant, _Queueing):
    """Chunks are still being filled."""

    breaks = "C19"

    def _fence_of_reads(self, near: Any, bus: Any) -> LazyFence:
        return LazyFence(near.record_event().synchronize)


class SaysItIsDoneWhenTheBusIs(Mutant, _Queueing):
    """Pages are still being written."""

    breaks = "C19"

    def _fence_of_writes(self, near: Any, bus: Any) -> LazyFence:
        return LazyFence(bus.record_event().synchronize)


class GoesOnAfterAnError(Mutant, _Queueing):
    """Continues to copy after an error, when the chunks belong to others."""

    breaks = "C19"

    def _give_up(self, near: Any, bus: Any) -> None:
        pass


class UsesTheFirstDevice(Mutant, _Queueing):
    """Whichever the memory is on."""

    breaks = "C20"

    def _device(self, where: Where) -> Device | None:
        return device_of(torch.device(where["pool"].device.type, 0))
