"""Requirements of connectors that queue work on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from kvloom import Segment
from kvloom_testkit.connectors.memories import ConnectorHarness, done, fill, filled, same
from kvloom_testkit.devices.simulated import SimulatedDevice
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
        error.

        Skipped for connectors that queue nothing by `kvloom.device`.

        Why: the engine computes on, and chunks are given to others at once. A place that is wrong is silent, rare, and
        another request's KV.

        Usually: the stream of the thread that copies is waited for and not the engine's, there is no event between two
        streams, a buffer is filled again before it was emptied, the fence is of another stream, or nothing is
        synchronized after an error.
        """
        if not _queues(opened()):
            pytest.skip("it queues nothing by kvloom.device")
        for seed in range(_SEEDS):
            device = SimulatedDevice(seed)
            with device.installed():
                _check_places(opened(), device)
                _check_errors(opened(), device, seed % 7)


def _queues(it: ConnectorHarness) -> bool:
    device = SimulatedDevice(0)
    with device.installed():
        it.read(it.segments(16, 8), it.engine())
    return device.queued > 0


def _check_places(it: ConnectorHarness, device: SimulatedDevice) -> None:
    source, target, segments = it.engine(seed=1), it.engine(blank=True), it.segments(16, 16, 8)
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


def _check_errors(it: ConnectorHarness, device: SimulatedDevice, after: int) -> None:
    """Some call of the device fails, or none, where there are not so many: nothing goes on then."""
    for verb in (it.connector.read, it.connector.write):
        memory, segments = it.engine(seed=1), it.segments(16, 16, 8)
        chunks, own = it.chunks(segments), filled(memory.kv(), seed=4)
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

    device.copy, device.queue = failing(device.copy), failing(device.queue)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del device.copy, device.queue


def _moved(verb: Callable[..., Any], segments: list[Segment], chunks: list[Any], where: Mapping[str, Any]) -> None:
    """On a thread whose current stream is another, as the core's are."""
    together(lambda: done(verb(segments, chunks, **where)))
