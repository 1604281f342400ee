"""The worker's half: one rank's engine, and the loads and saves that the scheduler's half ordered. Knows no vLLM."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch

from kvloom import Engine, Segment, Task, one_line

from .names import Names
from .plan import Move
from .scheduler import Orders, Report

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.005
"""Time that a step without computation waits for work under way. Otherwise the engine would spin, and keep the
interpreter from the threads that load and save."""
FENCE_SECONDS = 1.0
"""Time that a step waits for saves that read blocks which it gives to another request; then they are cancelled."""


@dataclass(frozen=True, slots=True)
class Part:
    """One group of layers: its engine, its names, and the tokens of its blocks."""

    engine: Engine
    names: Names
    block_tokens: int


class _Load(NamedTuple):
    move: Move
    segments: list[Segment]
    task: Task


class Worker:
    """The worker's half, one for each rank. All calls come from the engine's worker thread. A step with nothing to do
    costs microseconds."""

    def __init__(
        self, parts: Sequence[Part], *, rank: int, asynchronous: bool = True, by_request: bool = False
    ) -> None:
        """parts: by group; the engines of all are siblings of the first one's.

        asynchronous: no step computes with KV that is still being loaded. by_request: the engine cannot go on behind
        any block, so that a load that failed is told by its request, not by blocks.
        """
        self._asynchronous = asynchronous
        self._by_request = by_request
        self._parts = tuple(parts)
        self._engine = parts[0].engine
        """For all that the groups have in common: memory, counts."""
        self._rank = rank
        self._memory: list[dict[str, Any]] = [{} for _ in parts]
        self._orders: Orders | None = None
        self._loads: dict[str, list[_Load]] = {}
        self._saves: dict[int, Task] = {}
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._failures = 0
        self._idle = self._patient = False
        self._report = Report()
        self._counted: Mapping[Any, Any] = {}

    def attach(self, pages: Sequence[torch.Tensor], *, order: torch.Tensor | None = None, group: int = 0) -> None:
        """A group's memory, a view `[num_blocks, page_elements]` for each layer. order: see `VLLMBlobConnector`."""
        self._memory[group] = {"pages": tuple(pages), **({} if order is None else {"order": order})}

    # -- a step, in order ----------------------------------------------------------------------------------------------

    def fence(self, orders: Orders) -> None:
        """Wait for, or stop, reads of blocks that this step reuses, before it computes anything."""
        until = time.monotonic() + FENCE_SECONDS
        for number in orders.step.fence:
            task = self._saves.get(number)
            if task is not None and not task.wait(max(0.0, until - time.monotonic())):
                task.cancel()
                log.warning(
                    "a save was cancelled: its blocks are needed, and it was not done after %s s", FENCE_SECONDS
                )
        if orders.clear:
            self._empty_memory()

    def begin(self, orders: Orders) -> None:
        """The step's orders, before it is computed. Begins the saves of requests that are over."""
        self._orders = orders
        for move in orders.step.ended:
            self._save(move, orders)

    def load(self, *, wait: bool) -> None:
        """Begin the step's loads. wait: the step computes with their KV."""
        assert self._orders is not None
        step = self._orders.step
        for move in step.loads:
            self._load(move)
        for request in step.cancelled:
            for load in self._loads.get(request, ()):
                load.task.cancel()
        if wait:
            for request in {move.request: None for move in step.loads}:
                self._loaded(self._loads.pop(request))
                self._report.loaded.add(request)

    def save(self) -> None:
        """Begin the step's saves, once it has been computed (or queued on the device)."""
        assert self._orders is not None
        orders, self._orders = self._orders, None
        self._idle, self._patient = orders.idle, orders.patient
        for chunks in orders.step.touched:
            self._engine.touch(self._parts[chunks.group].names.segments(chunks))
        for move in orders.step.saves:
            self._save(move, orders)

    def finished(self) -> set[str]:
        """Requests whose loads are over since the last call, whether all came or not."""
        loads = (load.task for parts in self._loads.values() for load in parts if not load.task.done)
        under_way = next(loads, None) or next(iter(self._saves.values()), None)
        if self._idle and under_way is not None:
            under_way.wait(IDLE_SECONDS)
        elif self._idle and self._patient:
            time.sleep(IDLE_SECONDS)
        over = [request for request, loads in self._loads.items() if all(load.task.done for load in loads)]
        for request in over:
            self._loaded(self._loads.pop(request))
        self._report.loaded.update(over)
        return set(over)

    def failed_blocks(self) -> set[int]:
        """Blocks that were to be loaded and were not, since the last call; none if requests are told of."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def failed_requests(self) -> set[str]:
        """Requests, of those that `finished` told of, that did not get everything and have to begin anew."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def report(self) -> Report | None:
        """The report to the scheduler's half; None if there is nothing to report."""
        if self._saves:
            done = [number for number, task in self._saves.items() if task.done]
            for number in done:
                self._end_of(number, self._saves.pop(number))
            self._report.saved.update(done)
        changes = self._engine.changes()
        if changes.whole:
            self._report.whole.add(self._rank)
        if changes.came or changes.whole:
            self._report.came[self._rank] = changes.came
        if changes.left:
            self._report.left[self._rank] = changes.left
        if not self._report:
            return None
        report, self._report = self._report, Report()
        report.failures[self._rank] = self._failures
        return report

    def counts(self) -> dict[str, list[float]]:
        """Counts since the last call: `event|tier|reason` to number, chunks, tokens, bytes, seconds."""
        now, before = self._engine.counters(), self._counted
        self._counted = dict(now)
        found: dict[str, list[float]] = {}
        for key, totals in now.items():
            old = before.get(key)
            new = astuple(totals)
            delta = new if old is None else tuple(a - b for a, b in zip(new, astuple(old), strict=True))
            if any(delta):
                found["|".join(key)] = list(delta)
        return found

    def close(self) -> None:
        """Cancel work under way and write accepted chunks. Idempotent."""
        for load in (load for loads in self._loads.values() for load in loads):
            load.task.cancel()
        self._engine.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _load(self, move: Move) -> None:
        part = self._parts[move.chunks.group]
        segments, task = part.names.segments(move.chunks), _Over(0)
        try:
            if segments:
                task = part.engine.load(
                    segments, blocks=move.blocks, first_block=move.first_block, **self._memory[move.chunks.group]
                )
        except Exception as error:  # nothing of it may reach the engine
            log.warning("nothing is loaded for request %s: %s", one_line(move.request), error)
            task = _Over(len(segments))
        self._loads.setdefault(move.request, []).append(_Load(move, segments, task))

    def _save(self, move: Move, orders: Orders) -> None:
        if not self._asynchronous and orders.failures.get(self._rank, 0) < self._failures:
            # It was planned before the scheduler knew that some KV had not come: what was computed may be wrong.
            self._report.saved[move.number] += 1
            return
        try:
            part, memory = self._parts[move.chunks.group], self._memory[move.chunks.group]
            self._saves[move.number] = part.engine.save(
                part.names.segments(move.chunks), blocks=move.blocks, first_block=move.first_block, **memory
            )
        except Exception as error:  # nothing of it may reach the engine
            log.warning("nothing is saved of request %s: %s", one_line(move.request), error)
            self._report.saved[move.number] += 1

    def _loaded(self, loads: Sequence[_Load]) -> None:
        """Record the blocks of a request that did not get their KV, if it still wants it."""
        missing = set().union(*map(self._missing, loads))
        if missing:
            request = loads[0].move.request
            self._failures += 1
            self._report.failed.add(request)
            if self._by_request:
                self._failed_requests.add(request)
            else:
                self._failed_blocks |= missing

    def _missing(self, load: _Load) -> set[int]:
        move, missing = load.move, set[int]()
        try:
            mask = load.task.result().tolist()
        except Exception as error:  # whatever it was, the engine computes these blocks itself
            log.warning("a load for request %s failed: %s", one_line(move.request), error)
            mask = [False] * len(load.segments)
        if all(mask) or load.task.cancelled:
            return missing
        tokens = self._parts[move.chunks.group].block_tokens
        for segment, here in zip(load.segments, mask, strict=True):
            if not here:
                begin, end = segment.start // tokens, segment.end // tokens
                missing.update(move.blocks[begin - move.first_block : end - move.first_block])
        return missing - {-1}

    def _end_of(self, number: int, task: Task) -> None:
        try:
            task.result()
        except Exception as error:
            log.warning("save %d failed: %s", number, error)

    def _empty_memory(self) -> None:
        for task in self._saves.values():
            task.cancel()
        memory = self._engine.memory
        if memory is not None:
            memory.remove(memory.chunks())


class _Over(Task):
    """A load that never began: nothing of it came."""

    cancelled = False  # type: ignore[assignment]

    def __init__(self, segments: int) -> None:
        self._count = segments

    @property
    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> torch.Tensor:
        return torch.zeros(self._count, dtype=torch.bool)

    def wait(self, timeout: float) -> bool:
        return True

    def cancel(self) -> None:
        pass
