"""Fixtures of the core's tests."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pytest
import torch
from clock_support import Hang, SkippingClock, skipping_clock
from core_support import CHUNK, SPEC, Gate, Shelf, Watcher, Witness
from hypothesis import settings
from layers_support import STEP, Ranges

from kvloom import Engine, KVSpec, Registry
from kvloom.runtime import SystemRuntime
from kvloom.tiers.stored import maintenance

settings.register_profile("kvloom", deadline=None, max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", 25)))
settings.load_profile("kvloom")

# Several processes run tests at a time, and OpenMP's threads of one spin while another's work. Also in what they start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

BUILTIN = tuple(entry_points(group="kvloom.v1", name="builtin"))  # read once: it opens a file of every distribution

# The process keeps one thread for verbs of the main thread: it is there before tests count threads.
SystemRuntime().uninterrupted(int)


def pytest_collection_finish() -> None:
    """Collecting garbage skips torch and the tests: it is cheap, and frees closed engines often."""
    gc.collect()
    gc.freeze()
    gc.collect()


@pytest.fixture
def registry() -> Iterator[Registry]:
    mine = EntryPoint("core_support", "core_support", "kvloom.v1")
    yield Registry.discover(entry_points=[*BUILTIN, mine])
    Shelf.shelves.clear()
    Watcher.made.clear()
    Witness.made.clear()


@pytest.fixture
def open_engine(registry: Registry) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def forget_closed() -> None:
        """A property test opens hundreds, and the memory of a closed one goes with the last reference to it."""
        closed = [engine for engine in engines if engine._closed]
        engines[:] = [engine for engine in engines if not engine._closed]
        assert not sum(engine._stack.memory.pool.leaked for engine in closed), "memory that nobody gave back"

    def open(*tiers: dict[str, Any], spec: KVSpec = SPEC, **config: Any) -> Engine:
        forget_closed()
        blocks = tiers or ({"type": "memory", "capacity": "1MiB"},)
        source = {"chunk_tokens": CHUNK, "connector": "plain", "tiers": list(blocks), **config}
        engines.append(Engine.open(source, spec, registry=registry))
        return engines[-1]

    yield open
    for engine in engines:
        engine.close()
    forget_closed()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def skipping() -> Iterator[SkippingClock]:
    with skipping_clock() as clock:
        yield clock


@pytest.fixture
def hang(skipping: SkippingClock) -> Iterator[Hang]:
    """Name it after `open_engine` in a test: it opens before engines are closed."""
    hang = Hang(skipping)
    yield hang
    hang.open()


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    """A shelf that reads ranges, and layers that are worth a range however small they are."""
    ranges = Ranges()

    def get_range(self: Shelf, key: str, offset: int, into: memoryview) -> bool:
        ranges.before(key, offset)
        part = (self._blobs.get(key) or b"")[offset : offset + len(into)]
        if len(part) < len(into):
            return False
        into[:] = part
        return True

    monkeypatch.setattr(Shelf, "get_range", get_range)
    monkeypatch.setattr("kvloom.pipeline.layer_read.WHOLE_BYTES", 0)
    monkeypatch.setattr("kvloom.tiers.stored.layer_ranges.RANGE_BYTES", 2 * STEP)
    monkeypatch.setattr("kvloom.builtin.raw._SMALL_BYTES", 0)
    return ranges


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maintenance looks round all the time."""
    monkeypatch.setattr(maintenance, "ROUND_SECONDS", 0.02)
    monkeypatch.setattr(maintenance, "RELIST_SECONDS", 0.05)
    monkeypatch.setattr(maintenance, "TELL_SECONDS", 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the wall clock."""
    ahead = 0.0

    def move(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    monkeypatch.setattr(SystemRuntime, "wall", staticmethod(lambda: time.time() + ahead))
    return move
