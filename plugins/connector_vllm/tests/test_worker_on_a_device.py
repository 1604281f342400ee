"""The worker's half on a device that does everything as late and as out of order as it may: loads, saves, and blocks
that the next request has at once, against the KV that each block of tokens has to have."""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from halves_support import BLOCKS, LAYERS, Pretended, disk
from vllm_fakes import BLOCK, FakeRequest

from kvloom.device import CurrentStreams, StreamEvent, device_of
from kvloom_connector_vllm import worker
from kvloom_connector_vllm.paged.layers import LayerEvents
from kvloom_connector_vllm.scheduling.plan import Scheduled
from kvloom_connector_vllm.transfers import Transfer
from kvloom_connector_vllm.worker import Worker
from kvloom_testkit.devices.simulated import SimulatedDevice

REQUESTS, TABLE_BLOCKS = 15, 8


class Model(Pretended):
    """An engine of prompts that computes on a stream of a device. No request waits for saves of others."""

    def __init__(self, seed: int, folder: Path, device: SimulatedDevice) -> None:
        self.chance, self.device = random.Random(seed), device
        self.hits = self.by_layer = 0
        asynchronous, by_layer = self.chance.choice([(True, False), (False, False), (False, True), (False, True)])
        memory = {"type": "memory", "capacity": self.chance.choice(["64KiB", "24KiB"])}
        tiers = [memory, disk(folder)] if self.chance.random() < 0.25 else [memory]
        super().__init__(folder, tiers=tiers, asynchronous=asynchronous, by_layer=by_layer)

    def compute(self, request: FakeRequest, table: Sequence[int], first: int, last: int) -> None:
        """Queue it; the request's last blocks, which are not saved, get something too."""
        real = super().compute

        def run() -> None:
            real(request, table, first, last)
            for view in self.memory[0]:
                view[list(table[last // BLOCK :])] = -7.0

        self.device.queue(run)

    def request(self, name: str) -> None:
        chunks = [self.chance.choice((1, 2)), self.chance.choice((1, 2, 3))]
        tokens = [token for token in chunks for _ in range(2 * BLOCK)] + [4] * self.chance.choice((2, 6, 11))
        request, table = FakeRequest(name, tokens), self.chance.sample(range(BLOCKS), TABLE_BLOCKS)
        here = self.load(request, table)
        part = Scheduled(name, [table], True, here, request.num_tokens)
        self.step([part], lambda: self.compute(request, table, here, request.num_tokens))
        if self.chance.random() < 0.3:
            self.step()
        self.scheduler.end(name)
        self.hits += here > 0

    def load(self, request: FakeRequest, table: Sequence[int]) -> int:
        """Load what is found; return the number of tokens whose KV came. Each layer is read once it may be computed."""
        found = self.matched(request)
        if not found:
            return 0
        seen: list[torch.Tensor] = []

        def see(layer: int) -> None:
            view = self.memory[0][layer]
            self.device.queue(lambda: seen.append(view[list(table[: found // BLOCK])]))

        self.see_layer = see
        self.scheduler.load(request, [table], found)  # type: ignore[arg-type]
        over = self.step()
        until = time.monotonic() + 20
        while self.asynchronous and request.request_id not in over:
            assert time.monotonic() < until, "a load never ends"
            over = self.step()
        if not self.layers:
            for layer in range(LAYERS):
                see(layer)
        self.device.current().synchronize()
        failed, self.failed = self.failed, set()
        missing = [number for number, block in enumerate(table[: found // BLOCK]) if block in failed]
        here = missing[0] if missing else found // BLOCK
        for layer, pages in enumerate(seen):
            for number in range(here):
                assert torch.equal(pages[number], self.page(request, number, layer, 0)), "loaded KV is wrong"
        self.by_layer += bool(self.layers) and here > 0
        return here * BLOCK


def drive(seed: int) -> Model:
    """15 requests. For many seeds, in this folder:
    `python -c "import test_worker_on_a_device as t; [t.drive(seed) for seed in range(1_000)]"`."""
    device = SimulatedDevice(seed)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "model").mkdir()
        (folder / "model/model.safetensors").write_bytes(b"weights")
        if seed % 2:  # saves are given up as soon as their blocks are needed
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(worker, "FENCE_SECONDS", 0.0)
        stack.enter_context(device.installed())
        stack.enter_context(device.on(device.stream()))
        model = Model(seed, folder, device)
        stack.callback(model.close)
        for number in range(REQUESTS):
            model.request(str(number))
        model.settle()
        device.settle()
    return model


def test_no_order_of_work_shows() -> None:
    models = [drive(seed) for seed in range(12, 22)]
    assert sum(model.hits for model in models) > 50 and sum(model.by_layer for model in models) > 10


@pytest.mark.slow
@pytest.mark.parametrize("start", range(22, 422, 100))
def test_no_order_of_much_work_shows(start: int) -> None:
    for seed in range(start, start + 100):
        drive(seed)


def saves_that_come_after_nothing(patch: pytest.MonkeyPatch) -> None:
    """They are marked on a stream with nothing queued."""

    def mark(where: torch.device) -> StreamEvent:
        device = device_of(where)
        assert device is not None
        return device.stream().record_event()

    patch.setattr(worker, "mark", mark)


def threads_with_streams_of_their_own(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CurrentStreams, "current", lambda self: contextlib.nullcontext())


def blocks_given_away_while_saves_read_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Worker, "_wait_for", lambda self, saves: None)


def layers_computed_before_they_are_there(patch: pytest.MonkeyPatch) -> None:
    """The host waits until a layer is queued, and the stream for none."""
    wait = LayerEvents.wait

    def early(self: LayerEvents, layer: int) -> None:
        device = device_of(torch.device("cpu"))
        assert device is not None
        with device.on(device.stream()):
            wait(self, layer)

    patch.setattr(LayerEvents, "wait", early)


def cancel_that_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    def cancel(self: Transfer) -> None:
        self.cancelled = True
        if self.task is not None:
            self.task.stop()

    patch.setattr(Transfer, "cancel", cancel)


@pytest.mark.parametrize(
    ("plant", "start"),
    [
        (saves_that_come_after_nothing, 14),
        (threads_with_streams_of_their_own, 14),
        (blocks_given_away_while_saves_read_them, 0),
        (layers_computed_before_they_are_there, 5),
        (cancel_that_does_not_wait, 45),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """start: a seed that finds it at once, as a rule."""
    plant(monkeypatch)
    assert any(fails(seed) for seed in range(start, start + 200))


def fails(seed: int) -> bool:
    try:
        drive(seed)
    except AssertionError:
        return True
    return False
