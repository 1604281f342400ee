"""All that the simulation knows of the core's private parts, in one place: who owns which memory, what is held."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from kvloom import Segment, keys
from kvloom.builtin import raw
from kvloom.engine import builder
from kvloom.engine.lookup import Index
from kvloom.memory.pages import PAGE_BYTES
from kvloom.pipeline import layer_read
from kvloom.pipeline.task import Task
from kvloom.tiers.request_context import RequestContext
from kvloom.tiers.stored import breaker, maintenance
from simulation.connection import Guard
from simulation.content import PIECE_TOKENS
from simulation.fibers import Violation

_POISON = 0xDB


def pieces(engine: Index, tokens: torch.Tensor, salt: str, *, start: int | None = None) -> list[Segment]:
    """The pieces that shorter sequences may have left of the segment that begins at `start`; None: of each."""
    database = engine._tokens
    starts = [one.start for one in engine.segments(tokens, salt=salt)] if start is None else [start]
    return [piece for at in starts for piece in database.pieces(tokens, at, salt=salt)]


def leading(engine: Index, tokens: torch.Tensor, salt: str, there: Callable[[str], bool]) -> list[Segment]:
    """The segments of a prompt that can be served if exactly those keys are there."""
    found = []
    for segment in engine.segments(tokens, salt=salt):
        if not there(str(segment.key)):
            some = [one for one in pieces(engine, tokens, salt, start=segment.start) if there(str(one.key))]
            return found + keys.leading(some, segment.start)
        found.append(segment)
    return found


@dataclass(frozen=True)
class Pace:
    """Intervals of the core's own maintenance, in seconds. Intervals of minutes would never be met."""

    pause: float = breaker.FIRST_SECONDS
    round: float = maintenance.ROUND_SECONDS
    relist: float = maintenance.RELIST_SECONDS
    tell: float = maintenance.TELL_SECONDS
    whole_bytes: int = layer_read.WHOLE_BYTES
    """Larger chunks have a checksum for each layer, and are read by ranges when they are loaded layer by layer."""

    @property
    def longest_pause(self) -> float:
        return 60 * self.pause

    @property
    def settling(self) -> float:
        """By when everything that is to be looked after has been."""
        return 3 * self.longest_pause + 3 * self.relist + 5 * self.round


@contextmanager
def constants(pace: Pace) -> Iterator[None]:
    """While a run lasts: its pace, and small pools for engines without a memory tier, which are quick to make."""
    with (
        patch.object(keys, "PIECE_TOKENS", PIECE_TOKENS),
        patch.object(breaker, "FIRST_SECONDS", pace.pause),
        patch.object(breaker, "MOST_SECONDS", pace.longest_pause),
        patch.object(maintenance, "ROUND_SECONDS", pace.round),
        patch.object(maintenance, "RELIST_SECONDS", pace.relist),
        patch.object(maintenance, "TELL_SECONDS", pace.tell),
        patch.object(layer_read, "WHOLE_BYTES", pace.whole_bytes),
        patch.object(raw, "_SMALL_BYTES", pace.whole_bytes),
        patch.object(builder, "STAGING_BYTES", 128 << 10),
    ):
        yield


@contextmanager
def told_of_progress(arrived: Callable[[], None], ended: Callable[[], None]) -> Iterator[None]:
    """While this lasts: `arrived` is called when something arrived for an operation, `ended` when a task ends."""
    progress, end = RequestContext.progress, Task.run

    def progressed(self: RequestContext) -> None:
        progress(self)
        arrived()

    def run(self: Task, work: Callable[[Task], Any]) -> None:
        end(self, work)
        ended()

    with patch.object(RequestContext, "progress", progressed), patch.object(Task, "run", run):
        yield


class Held(NamedTuple):
    key: str
    size: int
    pinned: bool
    leased: bool


def pool_of(engine: Index) -> Any:
    return engine._stack.memory.pool


def held_chunks(engine: Index) -> list[Held]:
    """The content of the memory tier."""
    return [
        Held(str(key), held.block.size, held.pinned, held.block._leases > 0)
        for key, held in engine._stack.memory._index.entries.items()
    ]


def stored_tiers(engine: Index) -> list[Any]:
    return list(engine._stack.stored)


def listed_again(engine: Index) -> float:
    """Time at which every store with repeated listings will have been listed: a slow one is left alone."""
    shared = [tier.maintenance for tier in stored_tiers(engine) if tier.backend.shared]
    times = [maintenance._list_at for maintenance in shared if maintenance.evicts]
    return max(times, default=0.0)


def ledger_bytes(tier: Any) -> dict[str, int]:
    """The ledger's size of each blob in the store, by key."""
    ledger = tier.ledger
    rows = ledger._rows
    return {str(key): rows.bytes[ledger._held.find(key)] for key in ledger.names()}


class PoolGuard(Guard):
    """Follows every page of a pool: free memory is poisoned, owned memory has a number for each owner."""

    def __init__(self, pool: Any, stop: Callable[[Violation], None]) -> None:
        self._stop = stop
        self._bytes = np.frombuffer(pool.pages.view, dtype=np.uint8)[: pool.capacity]
        self._base = int(self._bytes.ctypes.data)
        self._owner = [0] * (pool.capacity // PAGE_BYTES)
        self._count = 0
        assert pool.used_bytes == 0, "the pool is guarded from the beginning"
        self._bytes[:] = _POISON
        self._reserve, self._free = pool.reserve, pool.free
        pool.reserve, pool.free = self.reserve, self.free

    @property
    def used_bytes(self) -> int:
        return sum(owner > 0 for owner in self._owner) * PAGE_BYTES

    def reserve(self, *args: Any, **kwargs: Any) -> Any:
        reservation = self._reserve(*args, **kwargs)
        if reservation is not None:
            self._take(reservation.start, reservation.size)
        return reservation

    def _take(self, start: int, size: int) -> None:
        pages = range(start // PAGE_BYTES, (start + size) // PAGE_BYTES)
        if any(self._owner[page] for page in pages):
            self._stop(Violation("double free", f"bytes {start} to {start + size} of the pool have two owners"))
        if (self._bytes[start : start + size] != _POISON).any():
            self._stop(Violation("late write", f"bytes {start} to {start + size} of the pool were written while free"))
        self._count += 1
        for page in pages:
            self._owner[page] = self._count

    def free(self, start: int, size: int, *after: Any) -> None:
        pages = range(start // PAGE_BYTES, (start + size) // PAGE_BYTES)
        if not all(self._owner[page] for page in pages):
            self._stop(Violation("double free", f"bytes {start} to {start + size} of the pool were given back twice"))
        for page in pages:
            self._owner[page] = 0
        self._bytes[start : start + size] = _POISON
        self._free(start, size, *after)

    def mark(self, view: memoryview) -> int:
        pages = self._pages(view)
        return self._owner[pages[0]] if pages else -1

    def owned(self, view: memoryview, mark: int) -> bool:
        return mark < 0 or (mark > 0 and all(self._owner[page] == mark for page in self._pages(view)))

    def _pages(self, view: memoryview) -> range:
        start = ctypes.addressof(ctypes.c_char.from_buffer(view)) - self._base
        if not 0 <= start < len(self._bytes):
            return range(0)
        return range(start // PAGE_BYTES, -(-(start + len(view)) // PAGE_BYTES))
