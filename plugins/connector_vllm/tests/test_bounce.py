"""Moves by way of a device's buffers, on a device that does everything as late and as out of order as it may."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from kvloom.device import StreamEvent
from kvloom_connector_vllm.paged import bounce
from kvloom_connector_vllm.paged.bounce import BounceBuffers, Queued
from kvloom_testkit.devices.simulated import SimulatedDevice

BLOCKS, WIDTH, STEPS = 24, 8, 40


class OutOfMemory(Exception):
    pass


@dataclass
class Engine:
    """Pages, what they are to hold, and moves that are under way, of which each has its blocks for itself."""

    seed: int
    chance: random.Random = field(init=False)
    device: SimulatedDevice = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.device = SimulatedDevice(self.seed + 1, holds=lambda memory: memory.data_ptr() in self.on_device)
        self.on_device: set[int] = set()
        """Addresses of chunks that are in its memory."""
        self.compute = self.device.stream()
        self.buffers = BounceBuffers(self.device, self.chance.choice((1, 1024, 4096)))
        self.pages = torch.zeros(BLOCKS, WIDTH, dtype=torch.uint8)
        self.expected = self.pages.clone()
        self.free = set(range(BLOCKS))
        self.under_way: list[tuple[Queued, list[int], list[torch.Tensor], list[torch.Tensor]]] = []
        """Fence, blocks, chunks of a read, and what they are to hold."""
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.given_back: list[tuple[torch.Tensor, int]] = []

    def blocks(self, most: int) -> list[int]:
        return self.chance.sample(sorted(self.free), min(len(self.free), self.chance.randint(1, most)))

    def compute_some(self) -> None:
        """The model writes blocks, and reads others."""
        mine, value = self.blocks(4) if self.free else [], self.chance.randint(1, 255)
        into, others = torch.zeros(BLOCKS, WIDTH, dtype=torch.uint8), sorted(self.free)
        with self.device.on(self.compute):
            self.device.queue(lambda: self.pages.__setitem__(mine, value))
            self.expected[mine] = value
            self.device.queue(lambda: into.__setitem__(others, self.pages[others]))
        wanted = torch.zeros_like(into)
        wanted[others] = self.expected[others]
        self.seen.append((into, wanted))

    def divided(self, blocks: Sequence[int]) -> list[list[int]]:
        """Among chunks."""
        found, rest = [], list(blocks)
        while rest:
            size = self.chance.randint(1, 3)
            found.append(rest[:size])
            rest = rest[size:]
        return found

    def move(self, *, to_pages: bool, fails: bool = False) -> None:
        if not self.free:
            return
        blocks = self.blocks(9)
        of = self.divided(blocks)
        chunks = [torch.randint(0, 256, (len(ids), WIDTH), dtype=torch.uint8) for ids in of]
        calls, kept = self.chance.randint(0, 2), []

        def near(first: int, parts: Sequence[torch.Tensor]) -> None:
            for ids, part in zip(of[first:], parts, strict=False):
                self.device.queue(partial(copy, ids, part))

        def copy(ids: list[int], part: torch.Tensor) -> None:
            if to_pages:
                self.pages[ids] = part
            else:
                part.copy_(self.pages[ids])

        with self.device.on(self.compute):
            ready = self.device.current().record_event()
        if to_pages and self.chance.random() < 0.3:  # the model makes them, after the mark
            for chunk in chunks:
                self.on_device.add(chunk.data_ptr())
                made, chunk[:] = chunk.clone(), 0
                with self.device.on(self.compute):
                    self.device.queue(partial(chunk.copy_, made))
                kept.append(made)
        else:
            kept = chunks
        if fails:
            real, self.device._copy = self.device._copy, lambda to, source: failing(to, source)  # type: ignore[method-assign]

            def failing(to: torch.Tensor, source: torch.Tensor) -> None:
                nonlocal calls
                if calls == 0:
                    raise OutOfMemory
                calls -= 1
                real(to, source)

            try:
                self.start(chunks, near, ready, to_pages=to_pages).wait()
            except OutOfMemory:
                pass
            finally:
                del self.device._copy
            if to_pages:  # the engine computes these blocks itself
                self.pages[blocks] = 99
                self.expected[blocks] = 99
            for chunk in chunks:  # the caller has them back, and gives them to somebody else
                value = self.chance.randint(0, 255)
                chunk.fill_(value)
                self.given_back.append((chunk, value))
            return
        self.free -= set(blocks)
        if to_pages:
            for ids, made in zip(of, kept, strict=True):
                self.expected[ids] = made
        wanted = [self.expected[ids].clone() for ids in of]
        fence = self.start(chunks, near, ready, to_pages=to_pages)
        self.under_way.append((fence, blocks, chunks, wanted))
        if self.chance.random() < 0.5:
            self.end()

    def start(self, chunks: list[torch.Tensor], near: bounce.Near, ready: StreamEvent, *, to_pages: bool) -> Queued:
        with self.device.on(self.compute):
            return (self.buffers.write if to_pages else self.buffers.read)(chunks, near, ready)

    def end(self) -> None:
        """Wait for one of the moves; its chunks are somebody else's afterwards."""
        if not self.under_way:
            return
        fence, blocks, chunks, wanted = self.under_way.pop(self.chance.randrange(len(self.under_way)))
        fence.wait()
        assert all(map(torch.equal, chunks, wanted))
        for chunk in chunks:
            value = self.chance.randint(0, 255)
            chunk.fill_(value)
            self.given_back.append((chunk, value))
        self.free |= set(blocks)
        assert torch.equal(self.pages[blocks], self.expected[blocks])

    def run(self) -> None:
        todo: list[Callable[[], None]] = [
            self.compute_some, lambda: self.move(to_pages=True), lambda: self.move(to_pages=False), self.end,
            lambda: self.move(to_pages=self.chance.random() < 0.5, fails=True),
        ]  # fmt: skip
        for _ in range(STEPS):
            self.chance.choice(todo)()
        while self.under_way:
            self.end()
        self.device.settle()
        assert torch.equal(self.pages, self.expected)
        assert all(torch.equal(into, wanted) for into, wanted in self.seen)
        assert all((chunk == value).all() for chunk, value in self.given_back), "written after it was given back"


@pytest.mark.parametrize("start", range(0, 120, 60))
def test_no_order_of_work_shows(start: int) -> None:
    for seed in range(start, start + 60):
        Engine(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1_000, 21_000, 5_000))
def test_no_order_of_much_work_shows(start: int) -> None:
    for seed in range(start, start + 5_000):
        Engine(seed).run()


def test_a_device_goes_with_what_has_its_memory() -> None:
    engine = Engine(0)
    engine.run()
    device = weakref.ref(engine.device)
    del engine
    gc.collect()
    assert device() is None


def test_closing_waits_for_what_uses_the_buffers() -> None:
    device = SimulatedDevice(1)
    buffers, chunk = BounceBuffers(device, 64), torch.ones(8, dtype=torch.uint8)
    ends = [go([chunk], lambda first, parts: device.queue(lambda: None))._event for go in (buffers.read, buffers.write)]
    buffers.close()
    assert all(event.happened for event in ends)  # type: ignore[attr-defined]


class Table:
    """The memory that a launch reads when it runs."""


@pytest.mark.parametrize("direction", ["read", "write"])
def test_the_memory_that_launches_read_is_kept_until_they_are_done_and_no_longer(direction: str) -> None:
    early = 0
    for seed in range(20):
        device, made = SimulatedDevice(seed), list[weakref.ref[Table]]()

        def near(first: int, parts: Sequence[torch.Tensor], made: list[weakref.ref[Table]] = made) -> Table:
            table = Table()
            made.append(weakref.ref(table))
            return table

        move = getattr(BounceBuffers(device, 1), direction)
        fence = move([torch.ones(8, dtype=torch.uint8) for _ in range(3)], near)
        if not fence._event.happened:
            early += 1
            assert made[-1]() is not None
        fence.wait()
        move([torch.ones(8, dtype=torch.uint8)], near).wait()
        assert [table() for table in made[:2]] == [None, None]
    assert early > 5


class Deaf:
    """A stream that does not wait for events."""

    def __init__(self, stream: object) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def wait_event(self, event: StreamEvent) -> None:
        pass


def not_ready(patch: pytest.MonkeyPatch) -> None:
    """The mark is of a stream on which nothing was queued."""
    real = BounceBuffers.read, BounceBuffers.write

    def instead(self: BounceBuffers, chunks: list[torch.Tensor], near: bounce.Near, *, call: Any) -> Queued:
        return call(self, chunks, near, self.device.stream().record_event())  # type: ignore[no-any-return]

    for name, call in zip(("read", "write"), real, strict=True):
        patch.setattr(
            BounceBuffers, name, lambda self, chunks, near, ready, call=call: instead(self, chunks, near, call=call)
        )


def deaf(patch: pytest.MonkeyPatch, name: str) -> None:
    """One of a direction's two streams waits for no event."""
    make, on = bounce._Way.__init__, SimulatedDevice.on

    def made(self: bounce._Way, *given: object) -> None:
        make(self, *given)  # type: ignore[arg-type]
        setattr(self, name, Deaf(getattr(self, name)))

    patch.setattr(bounce._Way, "__init__", made)
    patch.setattr(SimulatedDevice, "on", lambda self, stream: on(self, getattr(stream, "_stream", stream)))


def near_deaf(patch: pytest.MonkeyPatch) -> None:
    deaf(patch, "near")


def bus_deaf(patch: pytest.MonkeyPatch) -> None:
    deaf(patch, "bus")


def never_busy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bounce._Way, "give", lambda self, stream, held: setattr(self, "_turn", 1 - self._turn))


def free_too_early(patch: pytest.MonkeyPatch) -> None:
    """The other stream's place: the buffer is still being emptied."""
    give = bounce._Way.give
    patch.setattr(
        bounce._Way, "give", lambda self, stream, held: give(self, self.near if stream is self.bus else self.bus, held)
    )


def no_synchronize(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bounce._Way, "_synchronize", lambda self: None)


def fence_of_the_other_stream(patch: pytest.MonkeyPatch) -> None:
    read, write = BounceBuffers.read, BounceBuffers.write

    def instead(call: Callable[..., Queued], way: str, stream: str) -> Callable[..., Queued]:
        def run(self: BounceBuffers, *given: object) -> Queued:
            call(self, *given)
            return Queued(getattr(getattr(self, way), stream).record_event())

        return run

    patch.setattr(BounceBuffers, "read", instead(read, "_out", "near"))
    patch.setattr(BounceBuffers, "write", instead(write, "_in", "bus"))


def done_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Queued, "wait", lambda self: None)


def chunks_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedDevice, "holds", lambda self, memory: False)


def memory_of_another_stream(patch: pytest.MonkeyPatch) -> None:
    """Buffers are taken from a stream whose earlier work may still write to them."""
    empty = SimulatedDevice.empty

    def instead(self: SimulatedDevice, nbytes: int) -> torch.Tensor:
        with self.on(self.legacy):
            return empty(self, nbytes)

    patch.setattr(SimulatedDevice, "empty", instead)


PLANTED = [
    chunks_too_early, memory_of_another_stream, not_ready, near_deaf, bus_deaf, never_busy, free_too_early,
    no_synchronize, fence_of_the_other_stream, done_at_once,
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(fails(seed) for seed in range(1_000))


def fails(seed: int) -> bool:
    try:
        Engine(seed).run()
    except AssertionError:
        return True
    return False


@pytest.fixture(autouse=True)
def repeatable() -> None:
    torch.manual_seed(0)
