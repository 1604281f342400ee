"""Streams of a thread on another thread. CUDA is imitated: `test_on_a_gpu.py` has the real one."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvloom.device import CudaDevice, CurrentStreams


class Cuda(SimpleNamespace):
    """Four devices; a stream is a device and a name."""

    def __init__(self, current: int, streams: dict[int, str]) -> None:
        self.here, self.streams, self.entered = current, dict.fromkeys(range(4), "default") | streams, []
        Stream = SimpleNamespace
        super().__init__(
            here=self.here, is_initialized=lambda: True, current_device=lambda: self.here, device_count=lambda: 4,
            current_stream=lambda device: Stream(device=device, name=self.streams[device]),
            default_stream=lambda device: Stream(device=device, name="default"), stream=self.enter,
        )  # fmt: skip

    @contextmanager
    def enter(self, stream: Any) -> Any:
        before = self.here, self.streams[stream.device]
        self.here, self.streams[stream.device] = stream.device, stream.name
        self.entered.append((stream.device, stream.name))
        yield
        self.here, self.streams[stream.device] = before


def test_a_threads_device_and_streams_are_anothers_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", Cuda(2, {2: "compute", 1: "side"}))
    streams, other = CurrentStreams(), Cuda(0, {})
    monkeypatch.setattr(torch, "cuda", other)
    with streams.current():
        assert other.here == 2 and other.streams == {0: "default", 1: "side", 2: "compute", 3: "default"}
    assert other.here == 0 and set(other.streams.values()) == {"default"}
    assert streams and other.entered == [(1, "side"), (2, "compute")]


def test_no_device_is_touched_on_which_nothing_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context on it would take half a GB of its memory."""
    monkeypatch.setattr(torch, "cuda", cuda := Cuda(3, {}))
    with CurrentStreams().current():
        pass
    assert cuda.entered == [(3, "default")]


def test_without_cuda_there_is_nothing_to_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_initialized=lambda: False))
    streams = CurrentStreams()
    with streams.current():
        assert not streams


def test_a_batch_copies_all_pieces_those_that_are_apart_too() -> None:
    """By torch, as on a GPU; but for what it does there with memory that is not in one piece."""
    source = torch.arange(24.0).view(2, 3, 4)
    to = torch.zeros(2, 3, 4)
    device = CudaDevice(torch.device("cuda", 0))
    device.copy_batch([to[:, 1], to[0, 2]], [source[:, 1], source[0, 2]])
    assert to.flatten().nonzero().flatten().tolist() == [*range(4, 12), *range(16, 20)]
    assert torch.equal(to[:, 1], source[:, 1])
    device.copy_batch([], [])
