"""An engine whose KV is on a device that does everything as late and as out of order as it may: saves, loads,
cancellations and errors, against the KV that each block of tokens has to have."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom import Engine, Task
from kvloom.device import CurrentStreams
from kvloom_connector_vllm.paged.blocks import VLLMConnector
from kvloom_connector_vllm.paged.bounce import BounceBuffers, Queued, _Way
from kvloom_connector_vllm.paged.layers import LayerEvents
from kvloom_testkit.devices.simulated import SimulatedDevice, host_of
from kvloom_testkit.running import together
from kvloom_testkit.subjects import SPEC

LAYERS, BLOCK_TOKENS, CHUNK_BLOCKS, BLOCKS = 2, 4, 2, 40
ELEMENTS = BLOCK_TOKENS * SPEC.kv_planes * SPEC.hidden_dim
GEOMETRY = {"layers": LAYERS, "block_tokens": BLOCK_TOKENS, "page_elements": ELEMENTS}


class OutOfMemory(Exception):
    """The error that a device raises."""


class Model:
    """An engine of prompts, each with blocks of its own: what it computes follows from the tokens alone."""

    def __init__(
        self, seed: int, engine: Engine, device: SimulatedDevice, *, pages: tuple[torch.Tensor, ...] | None = None,
        blocks: Sequence[int] = range(BLOCKS), errors: bool = True,
    ) -> None:  # fmt: skip
        """pages: shared with other models, each of which has other blocks. errors: the device raises some."""
        self.chance, self.engine, self.device = random.Random(seed), engine, device
        self.compute = device.stream()
        self.pages = pages or tuple(torch.zeros(BLOCKS, ELEMENTS, dtype=SPEC.torch_dtype) for _ in range(LAYERS))
        self.free, self.errors = list(blocks), errors
        self.hits = self.by_layer = self.failures = 0

    def value(self, tokens: list[int], block: int) -> int:
        """The value of every element of a block: it follows from the block's tokens and all before."""
        return 1 + zlib.crc32(bytes(tokens[: (block + 1) * BLOCK_TOKENS])) % 100

    def request(self) -> None:
        chunks = [self.chance.choice((1, 2)) for _ in range(self.chance.randint(1, 4))]
        tokens = [token for token in chunks for _ in range(BLOCK_TOKENS * CHUNK_BLOCKS)]
        count = len(tokens) // BLOCK_TOKENS
        self.chance.shuffle(self.free)
        blocks, self.free = self.free[:count], self.free[count:]
        where = {"pages": self.pages, "blocks": blocks}
        segments = self.engine.segments(torch.tensor(tokens))
        events = LayerEvents(LAYERS, len(segments)) if self.chance.random() < 0.5 else None
        with self.device.on(self.compute):
            self.fill(blocks, [101 + n for n in range(count)])  # what the last owner left there
            self.fail_soon()
            load = self.engine.load(segments, layer_events=events, at_once=events is not None, **where)
            if events is not None:
                load.when_done(events.end)
        if self.chance.random() < 0.2:
            load.cancel()
            with self.device.on(self.compute):
                self.fill(blocks, [120] * count)
            self.see(blocks, [120] * count, "a load that was cancelled wrote")
            here = [False] * len(segments)
        else:
            try:
                if events is not None:
                    self.compute_by_layer(events, load, tokens, blocks)
                here = load.result(20).tolist()
            except OutOfMemory:
                here = [False] * len(segments)
        self.fail_no_more()
        self.hits += sum(here)
        with self.device.on(self.compute):
            for number, hit in enumerate(here):
                mine = range(number * CHUNK_BLOCKS, (number + 1) * CHUNK_BLOCKS)
                if not hit:
                    self.fill([blocks[n] for n in mine], [self.value(tokens, n) for n in mine])
            self.fail_soon()
            save = self.engine.save(segments, **where)
        self.see(blocks, [self.value(tokens, n) for n in range(count)], "a load gave other KV")
        self.end(save)
        with self.device.on(self.compute):
            self.fill(blocks, [122] * count)  # the blocks are somebody else's
        self.free += blocks

    def end(self, save: Task) -> None:
        if self.chance.random() < 0.2:
            save.cancel()
        else:
            with contextlib.suppress(OutOfMemory):
                save.result(20)
        self.fail_no_more()

    def fail_soon(self) -> None:
        """In one move of eight, one of the first four copies raises, and all after it."""
        if self.errors and self.chance.random() < 0.125:
            real, left = self.device._copy, iter(range(self.chance.randint(0, 3)))

            def copy(to: torch.Tensor, source: torch.Tensor) -> None:
                if next(left, None) is None:
                    self.failures += 1
                    raise OutOfMemory
                real(to, source)

            self.device._copy = copy  # type: ignore[method-assign]

    def fail_no_more(self) -> None:
        self.device.__dict__.pop("_copy", None)

    def compute_by_layer(self, events: LayerEvents, load: Task, tokens: list[int], blocks: list[int]) -> None:
        """Read each layer as soon as it is there; what was read counts if everything came."""
        seen: list[list[float]] = []
        with self.device.on(self.compute):
            for layer, view in enumerate(self.pages):
                events.wait(layer)
                self.device.queue(lambda view=view: seen.append([view[n].float().mean().item() for n in blocks]))
            self.compute.synchronize()
        if load.result(20).all():
            values = [float(self.value(tokens, n)) for n in range(len(blocks))]
            assert seen == [values] * LAYERS, "a layer was computed with before it was there"
            self.by_layer += 1

    def fill(self, blocks: list[int], values: list[int]) -> None:
        where, each = torch.tensor(blocks), torch.tensor(values, dtype=SPEC.torch_dtype)[:, None]

        def run() -> None:
            for view in self.pages:
                view[where] = each

        self.device.queue(run)

    def see(self, blocks: list[int], values: list[int], problem: str) -> None:
        where, each, seen = torch.tensor(blocks), torch.tensor(values, dtype=SPEC.torch_dtype)[:, None], list[bool]()
        with self.device.on(self.compute):
            self.device.queue(lambda: seen.extend(bool((view[where] == each).all()) for view in self.pages))
            self.compute.record_event().synchronize()
        assert seen == [True] * LAYERS, problem


def drive(seed: int) -> Model:
    """25 requests. For many seeds, in this folder:
    `python -c "import test_engine_on_a_device as t; [t.drive(seed) for seed in range(10_000)]"`."""
    device = SimulatedDevice(seed)
    config = config_of([MEMORY], staging=1 << random.Random(seed).randint(8, 14))
    with device.installed(), Engine.open(config, SPEC) as engine:
        model = Model(seed, engine, device)
        for _ in range(25):
            model.request()
        device.settle()
    return model


@pytest.mark.parametrize("start", range(0, 20, 10))
def test_no_order_of_work_shows(start: int) -> None:
    models = [drive(seed) for seed in range(start, start + 10)]
    assert sum(model.hits for model in models) > 100 and sum(model.by_layer for model in models) > 10
    assert sum(model.failures for model in models) > 5


MEMORY = {"type": "memory", "capacity": "64KiB"}


def config_of(tiers: list[dict[str, str]], staging: int = 4096) -> Mapping[str, Any]:
    return {
        "connector": {"type": "vllm", "geometry": GEOMETRY, "staging": staging},
        "chunk_tokens": BLOCK_TOKENS * CHUNK_BLOCKS,
        "tiers": tiers,
    }


def drive_threads(seed: int) -> list[Model]:
    """Four threads on one engine and one device, none of which waits for another: 8 requests each."""
    device = SimulatedDevice(seed)
    config = config_of([MEMORY], staging=1 << random.Random(seed).randint(8, 14))
    with device.installed(), Engine.open(config, SPEC) as engine:
        pages = tuple(torch.zeros(BLOCKS, ELEMENTS, dtype=SPEC.torch_dtype) for _ in range(LAYERS))
        models = [
            Model(4 * seed + n, engine, device, pages=pages, blocks=range(BLOCKS)[n::4], errors=False) for n in range(4)
        ]

        def run(model: Model) -> None:
            for _ in range(8):
                model.request()

        together(*(partial(run, model) for model in models))
        device.settle()
    return models


def test_threads_share_an_engine() -> None:
    models = [model for seed in range(3) for model in drive_threads(seed)]
    assert sum(model.hits for model in models) > 50 and sum(model.by_layer for model in models) > 5


@pytest.mark.slow
def test_threads_share_an_engine_in_many_orders() -> None:
    for seed in range(3, 153):
        drive_threads(seed)


def test_moves_of_two_threads_that_are_queued_at_once_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = _Way.__init__

    def made(self: _Way, *given: Any) -> None:
        make(self, *given)
        self._lock = contextlib.nullcontext()  # type: ignore[assignment]

    monkeypatch.setattr(_Way, "__init__", made)
    assert any(fails(seed, drive_threads) for seed in range(100))


def drive_ranks(ranks: int, seed: int) -> list[SimulatedDevice]:
    """Each but the first works, on a thread of its own, which has chosen its device."""
    devices = [SimulatedDevice(seed)]
    devices += [SimulatedDevice(seed + rank, beside=devices[0]) for rank in range(1, ranks)]

    def run(rank: int) -> None:
        with Engine.open(config_of([MEMORY]), replace(SPEC, world_size=ranks, rank=rank)) as engine:
            model = Model(seed, engine, devices[rank])
            for _ in range(6):
                model.request()
            assert model.hits

    with host_of(devices):
        together(*(partial(run, rank) for rank in range(1, ranks)))
        devices[0].settle()
    return devices


def test_no_memory_for_a_move_is_a_counted_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(1)
    with device.installed(), Engine.open(config_of([MEMORY], staging=4096), SPEC) as engine:
        where = {"pages": tuple(torch.ones(8, ELEMENTS, dtype=SPEC.torch_dtype) for _ in range(LAYERS))}
        where |= {"blocks": list(range(8))}
        tokens = torch.arange(8 * BLOCK_TOKENS)
        segments = engine.segments(tokens)

        def full(self: SimulatedDevice, num_bytes: int) -> torch.Tensor:
            raise torch.OutOfMemoryError(f"tried to allocate {num_bytes}")

        with monkeypatch.context() as patch:
            patch.setattr(SimulatedDevice, "empty", full)
            assert not engine.save(segments, **where).result(20).any()
        assert engine.save(segments, **where).result(20).all()
        with monkeypatch.context() as patch:
            patch.setattr(SimulatedDevice, "empty", full)
            assert not engine.load(segments, **where).result(20).any()
            assert not engine.retrieve(tokens, **where).any()
        assert engine.load(segments, **where).result(20).all()
        counted = {name: totals.chunks for (name, _, reason), totals in engine.counters().items() if "device" in reason}
        assert counted == {"dropped": len(segments), "missed": 2 * len(segments)}


@pytest.mark.parametrize("ranks", [2, 8])
def test_each_rank_works_on_its_own_device(ranks: int) -> None:
    """And none on device 0, with which every thread begins."""
    first, *others = drive_ranks(ranks, 1)
    assert not first.used and all(device.queued > 20 for device in others)


def test_a_rank_whose_threads_begin_with_device_0_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CurrentStreams, "current", lambda self: contextlib.nullcontext())
    first, _ = drive_ranks(2, 1)
    assert first.used


@pytest.mark.parametrize("replicated", [True, False])
def test_kv_that_all_ranks_have_is_kept_once(tmp_path: Path, replicated: bool) -> None:
    """In the host's stores, as MLA's latent KV; heads that are divided among ranks are kept by each. Memory tiers are
    each rank's own."""
    devices = [SimulatedDevice(0)]
    devices += [SimulatedDevice(rank, beside=devices[0]) for rank in range(1, 8)]
    for rank, device in enumerate(devices):
        pages = tuple(torch.full((8, ELEMENTS), 7.0).to(SPEC.torch_dtype) for _ in range(LAYERS))
        spec = replace(SPEC, world_size=8, rank=rank, replicated=replicated)
        tiers = [MEMORY, {"type": "disk", "path": str(tmp_path)}]
        with host_of(devices), device.on(device.stream()), Engine.open(config_of(tiers), spec) as engine:
            segments = engine.segments(torch.arange(8 * BLOCK_TOKENS))
            assert engine.save(segments, pages=pages, blocks=list(range(8))).result(20).any()
            assert engine.flush(20)
            blank = tuple(torch.zeros_like(view) for view in pages)
            assert engine.load(segments, pages=blank, blocks=list(range(8))).result(20).all()
            assert all(map(torch.equal, blank, pages))
    blobs = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.parent.name == "-"]
    assert len(blobs) == len(segments) * (1 if replicated else 8)


def threads_with_streams_of_their_own(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VLLMConnector, "ordered", lambda self, where: where)
    patch.setattr(CurrentStreams, "current", lambda self: contextlib.nullcontext())


def fence_that_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Queued, "wait", lambda self: None)


def loads_that_come_after_nothing(patch: pytest.MonkeyPatch) -> None:
    write, start = BounceBuffers.write, SimulatedDevice.stream

    def early(self: BounceBuffers, chunks: Any, scatter: Any, ready: Any = None) -> Queued:
        return write(self, chunks, scatter, start(self.device).record_event())  # type: ignore[arg-type]

    patch.setattr(BounceBuffers, "write", early)


def second_layer_that_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    wait = LayerEvents.wait
    patch.setattr(LayerEvents, "wait", lambda self, layer: None if layer == 1 else wait(self, layer))


def layers_marked_by_the_event_of_their_copies(patch: pytest.MonkeyPatch) -> None:
    write, there = BounceBuffers._write, LayerEvents.there
    over_the_bus: list[Any] = []

    def marking(self: BounceBuffers, way: Any, *given: Any) -> None:
        write(self, way, *given)
        over_the_bus.append(way.bus.record_event())

    def early(self: LayerEvents, device: Any, event: Any) -> None:
        there(self, device, over_the_bus.pop())

    patch.setattr(BounceBuffers, "_write", marking)
    patch.setattr(LayerEvents, "there", early)


@pytest.mark.parametrize(
    "plant",
    [
        threads_with_streams_of_their_own,
        fence_that_does_not_wait,
        loads_that_come_after_nothing,
        second_layer_that_is_not_waited_for,
        layers_marked_by_the_event_of_their_copies,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(fails(seed) for seed in range(200))


def fails(seed: int, drive: Callable[[int], object] = drive) -> bool:
    try:
        drive(seed)
    except AssertionError:
        return True
    return False
