"""Support for the memory tier's tests: a tier with short calls, its clock and events, and its write-back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvloom import Chunk, ChunkKey, Event, MemoryFormat
from kvloom.memory import Pool
from kvloom.runtime import SystemRuntime
from kvloom.telemetry.events import EventBus
from kvloom.tiers.memory.tier import MemoryTier
from kvloom.tiers.tier import Layout, Loaded

PAGE = 4096


class Clock(SystemRuntime):
    """The real runtime with a clock that is set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 1000.0

    def now(self) -> float:  # type: ignore[override]
        return self.seconds

    wall = now  # type: ignore[assignment]


class Events(EventBus):
    """Counts, and remembers in order."""

    def __init__(self, runtime: Clock) -> None:
        super().__init__((), runtime)
        self.seen: list[Event] = []

    def emit(self, event: Event) -> None:
        self.seen.append(event)

    def of(self, name: str) -> list[str]:
        return [event.reason for event in self.seen if event.name == name]


def key_of(number: int, tenant: str = "-") -> ChunkKey:
    return ChunkKey(f"f/{tenant}", number, number.to_bytes(32, "big"))


class Tier:
    """A memory tier of `pages` chunks of one page, and short words for what the tests do with it."""

    def __init__(self, pages: int, **settings: Any) -> None:
        self.clock = Clock()
        self.events = Events(self.clock)
        self.pool = Pool(pages * PAGE, self.clock)
        layout = Layout(MemoryFormat.KV_BLOB, torch.uint8, lambda tokens: (2, 1, tokens, PAGE // 8))
        self.tier = MemoryTier(layout, self.pool, self.events, self.clock, **settings)

    def put(self, key: ChunkKey, *, fidelity: str = "exact", pages: int = 1, keep: bool = False, **how: Any) -> Any:
        reservation = self.tier.reserve(pages * PAGE)
        if reservation is None:
            return None
        chunk = Chunk(reservation.tensor((2, 1, 4 * pages, PAGE // 8), torch.uint8), MemoryFormat.KV_BLOB, 4, fidelity)
        chunk.tensor.fill_(key.depth % 256)
        block = reservation.seal()
        assert block is not None
        loaded = self.tier.insert(key, chunk, block, **how)
        if keep:
            return loaded
        loaded.release()
        return True

    def has(self, *keys: ChunkKey) -> list[bool]:
        return self.tier.find(keys)


Make = Callable[..., Tier]
A, B, C, D, E, F = (key_of(number) for number in range(6))


@contextlib.contextmanager
def tiers() -> Iterator[Make]:
    """Makes memory tiers, which are closed at the end, when all of their memory is given back."""
    made: list[Tier] = []

    def make(pages: int = 4, **settings: Any) -> Tier:
        made.append(Tier(pages, **settings))
        return made[-1]

    yield make
    for one in made:
        one.tier.close()
        one.pool.close()
        assert one.pool.leaked == 0


class Queue:
    """A write queue under a tier's `write_back` that does what the test says, and keeps what it was given."""

    def __init__(self, verdict: bool | None = True) -> None:
        self.verdict = verdict
        self.asked: list[ChunkKey] = []
        self.taken: dict[ChunkKey, Loaded] = {}

    def __call__(self, key: ChunkKey, loaded: Loaded) -> bool | None:
        self.asked.append(key)
        if self.verdict:
            assert key not in self.taken, "offered twice"
            self.taken[key] = loaded
        return self.verdict

    def written(self) -> None:
        """All that was taken on is written."""
        while self.taken:
            self.taken.popitem()[1].release()
