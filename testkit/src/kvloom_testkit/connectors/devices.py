"""Requirements of connectors that queue work on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch

from kvloom import Segment
from kvloom_testkit import effort
from kvloom_testkit.connectors.memories import ConnectorHarness, done, fill, filled, same
from kvloom_testkit.devices.simulated import SimulatedDevice, host_of
from kvloom_testkit.running import together

Opened = Callable[[], ConnectorHarness]
_SEEDS = 30


class OutOfMemory(Exception):
    """The error that a device raises."""


class DeviceRequirements:
    """Of `ConnectorConformance`."""

    def test_C19_queued_moves_keep_their_place(self, opened: Opened) -> None:
        """On a device that does queued work as late, and in as unlikely an order, as streams allow: a read sees what
        was queued when `ordered` was called, and nothing queued after its fence; readers that were queued before a
        write see the old KV, and those behind its fence the new; chunks are not touched after the fence, nor after an
        error. So it is in the second call too, with other memory, and with chunks and tables that are not pinned.

        Skipped for connectors that queue nothing by `kvloom.device`.

        Why: the engine computes on, and chunks are given to others at once. A place that is wrong is silent, rare, and
        another request's KV.

        Usually: the stream of the thread that copies is waited for and not the engine's, there is no event between two
        streams, a buffer or a table is filled again or given back before it was used, the fence is of another stream,
        launches that were captured are replayed with the arguments of then, or nothing is synchronized after an error.
        """
        if not _queues(opened()):
            pytest.skip("it queues nothing by kvloom.device")
        for seed in range(effort.rounds(_SEEDS)):
            on_device: list[Any] = []
            pageable = partial(_elsewhere, on_device) if seed % 2 else _nothing
            device = SimulatedDevice(seed, pageable=pageable)
            with device.installed():
                it = opened()
                for _ in range(2):
                    _check_places(it, device, on_device)
                _check_errors(opened(), device, seed % 7, on_device)

    def test_C20_it_uses_the_device_of_its_memory(self, opened: Opened) -> None:
        """With an engine's KV on device 1, everything is made and queued there, and nothing on device 0.

        Skipped for connectors that queue nothing by `kvloom.device`.

        Why: with tensor parallelism each rank has a device, and every thread begins with device 0. What is done there
        by mistake takes half a GB of its memory for each rank, and comes in no order with the work of the rank's own.

        Usually: a stream, a buffer or a table is made for "cuda", for number 0, or for a thread's current device.
        """
        if not _queues(opened()):
            pytest.skip("it queues nothing by kvloom.device")
        first = SimulatedDevice(0)
        device = SimulatedDevice(1, beside=first)
        with host_of([first, device], default=1):
            _check_places(opened(), device, [])
        assert device.queued, "the device of its memory was not used"
        assert not first.used, "device 0 was used, and the memory is on device 1"


def _queues(it: ConnectorHarness) -> bool:
    device = SimulatedDevice(0)
    with device.installed():
        it.read(it.segments(16, 8), it.engine())
    return device.queued > 0


def _nothing(tensor: torch.Tensor) -> bool:
    return False


def _elsewhere(on_device: list[Any], tensor: torch.Tensor) -> bool:
    """Not in one of the tensors of these values."""
    storage = tensor.untyped_storage().data_ptr()
    return all(each.untyped_storage().data_ptr() != storage for each in _tensors(on_device))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _check_places(it: ConnectorHarness, device: SimulatedDevice, on_device: list[Any]) -> None:
    """on_device: values whose tensors are in the device's memory; the engine's are added."""
    source, target, segments = it.engine(seed=1), it.engine(blank=True), it.segments(16, 16, 8)
    on_device += [source.where, target.where]
    new, old, compute = filled(source.kv(), seed=2), target.kv(), device.stream()
    with device.on(compute):
        device.queue(lambda: source.set_kv(new))
        where = it.connector.ordered(source.where)
    chunks = it.chunks(segments)
    _moved(it.connector.read, segments, chunks, where)
    held = [chunk.tensor.clone() for chunk in chunks]
    with device.on(compute):
        device.queue(lambda: fill(source, seed=3))
    device.settle()
    assert all(same(chunk.tensor, tensor) for chunk, tensor in zip(chunks, held, strict=True)), "read after the fence"
    seen: list[torch.Tensor] = []
    with device.on(compute):
        device.queue(lambda: seen.append(target.kv()))
        where = it.connector.ordered(target.where)
    _moved(it.connector.write, segments, chunks, where)
    for chunk in chunks:
        chunk.tensor.view(-1).view(torch.uint8).fill_(0x33)
    with device.on(compute):
        device.queue(lambda: seen.append(target.kv()))
    device.settle()
    assert all((chunk.tensor.view(-1).view(torch.uint8) == 0x33).all() for chunk in chunks), "touched after the fence"
    assert same(seen[0], old), "a write came before readers that were queued before it"
    assert same(seen[1], new), "KV of another time"


def _check_errors(it: ConnectorHarness, device: SimulatedDevice, after: int, on_device: list[Any]) -> None:
    """Some call of the device fails, or none, where there are not so many: nothing goes on then."""
    for verb in (it.connector.read, it.connector.write):
        memory, segments = it.engine(seed=1), it.segments(16, 16, 8)
        chunks, own = it.chunks(segments), filled(memory.kv(), seed=4)
        on_device.append(memory.where)
        with _failing(device, after), suppress(OutOfMemory):
            done(verb(segments, chunks, **memory.where))
        for chunk in chunks:
            chunk.tensor.view(-1).view(torch.uint8).fill_(0x44)
        memory.set_kv(own)
        device.settle()
        untouched = all((chunk.tensor.view(-1).view(torch.uint8) == 0x44).all() for chunk in chunks)
        assert untouched and same(memory.kv(), own), "written after an error"


@contextmanager
def _failing(device: SimulatedDevice, after: int) -> Iterator[None]:
    """After so many calls, copies and launches raise."""
    left = [after]

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OutOfMemory
            return call(*given)

        return run

    device._copy, device.queue = failing(device._copy), failing(device.queue)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del device._copy, device.queue


def _moved(verb: Callable[..., Any], segments: list[Segment], chunks: list[Any], where: Mapping[str, Any]) -> None:
    """On a thread whose current stream is another, as the core's are."""
    together(lambda: done(verb(segments, chunks, **where)))
