"""The worker's half: one rank's engine, and the loads and saves that the scheduler's half ordered. Knows no vLLM."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple
from functools import partial
from itertools import islice
from threading import Event
from typing import Any, Literal

import torch

from kvloom import one_line
from kvloom.device import CurrentStreams

from .paged.bounce import mark
from .paged.layers import LayerEvents
from .scheduling.messages import Orders, Report
from .scheduling.plan import Chunks, Move
from .transfers import MemoryChanges, Part, Transfer

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.005
"""Time that a step without computation waits for work under way. Otherwise the engine would spin, and keep the
interpreter from the threads that load and save."""
FENCE_SECONDS = 1.0
"""Time that a step waits for copies of blocks which it gives to another request; then they are cancelled."""
STALLED_SECONDS = 0.05
"""The part of it for a save that waits for room: the tiers are slower than what is computed."""
LATER_SECONDS = 0.05
"""Time after which a step's saves begin, unless a step needs their blocks or has nothing to do before."""
COLLECT_SECONDS = 0.1
"""Time after which chunks that left memory by themselves are looked for. After each load and save they are, anyway."""


class Worker:
    """The worker's half, one for each rank. All calls come from the engine's worker thread. A step with nothing to do
    costs microseconds.

    Loads and saves begin on threads of their own, so that the model does not wait for it: on a process's main thread
    every call of an engine is a change of threads, which takes some 0.3 ms while others run.
    """

    def __init__(
        self, parts: Sequence[Sequence[Part]], *, rank: int, asynchronous: bool = True, by_request: bool = False,
        by_layer: bool = False, written_first: bool = False,
    ) -> None:  # fmt: skip
        """parts: by group; none of a group of which this rank has no layers. The engines of all are siblings.

        asynchronous: no step computes with KV that is still being loaded. by_request: the engine cannot go on behind
        any block, so that a load that failed is told by its request, not by blocks. by_layer: a step that computes
        with KV that is being loaded calls `wait_for_layer` before each layer. Not if `asynchronous`. written_first: the
        engine may write to blocks that a step gives away before `fence` of that step, so that each step ends its saves.
        """
        assert not (asynchronous and by_layer)
        self._asynchronous = asynchronous
        self._by_request = by_request
        self._by_layer = by_layer
        self._awaited: list[str] = []
        """Requests with loads that the step computes with."""
        self._written_first = written_first
        self._parts = tuple(map(tuple, parts))
        self._engine = next(part.engine for some in parts for part in some)
        """For all that the groups have in common: memory, counts."""
        self._rank = rank
        self._orders: Orders | None = None
        self._calls = ThreadPoolExecutor(1, "kvloom-step")
        self._later = ThreadPoolExecutor(1, "kvloom-later")
        """Begins saves."""
        self._changes = MemoryChanges(self._engine)
        self._collect_due = 0.0
        self._loads: dict[str, list[Transfer]] = {}
        self._saves: dict[int, list[Transfer]] = {}
        self._needed = Event()
        """Set to have the saves that were ordered so far begin."""
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._failures = 0
        self._step_failed = False
        self._told = False
        """That KV was not saved in time."""
        self._idle = self._patient = False
        self._report = Report()
        self._counted: Mapping[Any, Any] = {}

    def attach(
        self, pages: Sequence[torch.Tensor], *, orders: Sequence[torch.Tensor] | None = None, group: int = 0
    ) -> None:
        """A group's memory, a view `[num_blocks, page_elements]` for each layer. orders: of each of its parts; see
        `VLLMBlobConnector`."""
        views = tuple(pages)
        for number, part in enumerate(self._parts[group]):
            part.memory = {"pages": views} if orders is None else {"pages": views, "order": orders[number]}

    # -- a step, in order ----------------------------------------------------------------------------------------------

    def fence(self, orders: Orders) -> None:
        """Wait for, or stop, reads of blocks that this step reuses, before it computes anything."""
        if orders.clear:
            self._empty_memory()  # first: a save of before the reset may read what has been overwritten since
        self._wait_for(orders.step.fence)

    def begin(self, orders: Orders) -> None:
        """The step's orders, before it is computed."""
        self._orders = orders
        self._report.ascertained = orders.step.uncertain  # its report goes with what the step's loads have come to
        self._save_later(orders.step.ended, orders)

    def load(self, *, wait: bool) -> None:
        """Begin the step's loads. wait: the step computes with their KV, which is there on return; by layers, once
        `wait_for_layer` has returned."""
        assert self._orders is not None
        step = self._orders.step
        loads = []
        for move in step.loads:
            its = self._transfers(move)
            self._loads.setdefault(move.request, []).extend(its)
            loads += its
        if self._by_layer:
            for load in loads:
                chunks = load.move.chunks
                count = len(chunks.digests) + len(chunks.pieces)
                load.layers = LayerEvents(len(load.part.memory["pages"]), count)
        if loads:
            self._calls.submit(self._begun, "load", loads, CurrentStreams())
        for request in step.cancelled:
            for load in self._loads.get(request, ()):
                load.cancel()
        if wait:
            self._awaited = list({move.request: None for move in step.loads})
            if not self._by_layer:
                self._end_awaited()

    def wait_for_layer(self, layer: int | None) -> None:
        """Have what is computed from now on come after the loads of this layer; of all layers, if it is None."""
        for load in (load for request in self._awaited for load in self._loads[request]):
            if load.layers is not None:
                for each in range(load.layers.layers) if layer is None else (layer,):
                    load.layers.wait(each)

    def save(self, *, computed: bool = True) -> None:
        """The step has been computed, or queued on the device. Its saves begin later.

        They take the interpreter from the thread that has to choose this step's tokens, or to compute a prompt's last.
        computed: False if it failed. Nothing is saved any more then, as later steps compute with what it left.
        """
        assert self._orders is not None
        if not (computed or self._step_failed):
            self._step_failed = True
            log.warning("KV is not saved any more: computing a step failed, and what it left is not what tokens have")
        self._end_awaited()  # first: what was computed with KV that did not come is not saved
        orders, self._orders = self._orders, None
        self._idle, self._patient = orders.idle, orders.patient
        self._save_later(orders.step.saves, orders, orders.step.touched)
        if self._written_first:
            self._wait_for(self._saves)

    def finished(self) -> set[str]:
        """Requests whose loads are over since the last call, whether all came or not; none that a step waited for."""
        self._end_awaited()
        if self._idle:
            self._wait_idly()
        over = [request for request, loads in self._loads.items() if all(load.over.is_set() for load in loads)]
        for request in over:
            self._loaded(request, self._loads.pop(request))
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
        done = [number for number, saves in self._saves.items() if all(save.over.is_set() for save in saves)]
        for number in done:
            self._end_of(number, self._saves.pop(number))
        self._report.saved.update(done)
        self._changes.move_to(self._report, self._rank)
        if time.monotonic() >= self._collect_due:
            self._collect_due = time.monotonic() + COLLECT_SECONDS
            self._calls.submit(self._collect)
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

    def end_saves(self) -> None:
        """Once this has returned, no save reads the engine's KV, which may be overwritten or be given back."""
        for save in self._saving():
            save.cancel()

    def end_transfers(self) -> None:
        """Once this has returned, nothing reads or writes the engine's KV. Loads that are cut off have failed."""
        self.end_saves()
        self._end_loads()

    def close(self) -> None:
        """Cancel loads under way, and write what was saved, the last step's KV too. Idempotent."""
        self._needed.set()
        self._end_loads()
        self._calls.shutdown()
        self._later.shutdown()
        with ExitStack() as closed:  # one closes the tiers, and which one depends on the sizes of the groups
            for part in (part for some in self._parts for part in some):
                closed.callback(part.engine.close)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _wait_for(self, saves: Collection[int]) -> None:
        """Once this has returned, these saves do not read the engine's KV any more."""
        if saves:
            self._need_saves()
        until = time.monotonic() + FENCE_SECONDS
        for save in (save for number in saves for save in self._saves.get(number, ())):
            if save.over.is_set() or save.cancelled:
                continue
            if not save.wait_for_copies(until, stalled=STALLED_SECONDS):
                level = logging.DEBUG if self._told else logging.WARNING
                log.log(level, "KV is not saved: its blocks are needed, and the tiers do not take it in time")
                self._told = True
            if not save.over.is_set():
                save.cancel()

    def _wait_idly(self) -> None:
        """Wait up to `IDLE_SECONDS` for all loads of one request, or for a save if nothing loads."""
        loading = (loads for loads in self._loads.values() if not all(load.over.is_set() for load in loads))
        awaited = next(loading, None)
        if not awaited:
            self._need_saves()
            awaited = list(islice(self._saving(), 1))
        until = time.monotonic() + IDLE_SECONDS
        for transfer in reversed(awaited):  # woken once: the last one ends last as a rule
            transfer.over.wait(max(0.0, until - time.monotonic()))
        if self._patient and not awaited:
            time.sleep(IDLE_SECONDS)

    def _save_later(self, moves: Sequence[Move], orders: Orders, touched: Sequence[Chunks] = ()) -> None:
        """Save KV, and note the use of chunks: after `LATER_SECONDS`, or once saves are needed."""
        # Planned before the scheduler knew that some KV had not come: what was computed may be wrong.
        behind = not self._asynchronous and orders.failures.get(self._rank, 0) < self._failures
        if behind or self._step_failed:
            self._report.saved.update(move.number for move in moves)
            moves = ()
        saves = {move.number: self._transfers(move) for move in moves}
        self._saves |= saves
        if saves or touched:
            transfers = [save for its in saves.values() for save in its]
            due = time.monotonic() + LATER_SECONDS
            for save in transfers:  # not what later steps queue on the device
                save.ready = mark(save.part.memory["pages"][0].device)
            self._later.submit(self._begun_later, self._needed, due, touched, transfers, CurrentStreams())

    def _transfers(self, move: Move) -> list[Transfer]:
        return [Transfer(move, part) for part in self._parts[move.chunks.group]]

    def _saving(self) -> Iterator[Transfer]:
        return (save for saves in self._saves.values() for save in saves if not save.over.is_set())

    def _end_awaited(self) -> None:
        """Wait for the loads that the step computes with, and note which came."""
        awaited, self._awaited = self._awaited, []
        for request in awaited:
            for load in self._loads[request]:
                load.over.wait()
            self._loaded(request, self._loads.pop(request))
            self._report.loaded.add(request)

    def _end_loads(self) -> None:
        for load in (load for loads in self._loads.values() for load in loads if not load.over.is_set()):
            load.cut_off |= not load.cancelled  # else nobody needs it
            load.cancel()

    def _need_saves(self) -> None:
        """Have the saves that were ordered so far begin."""
        self._needed.set()
        self._needed = Event()

    def _begun_later(
        self, needed: Event, due: float, touched: Sequence[Chunks], saves: Sequence[Transfer], streams: CurrentStreams
    ) -> None:
        needed.wait(max(0.0, due - time.monotonic()))
        self._touch(touched)
        self._begun("save", saves, streams)

    def _begun(self, verb: Literal["load", "save"], transfers: Sequence[Transfer], streams: CurrentStreams) -> None:
        for transfer in transfers:
            move, part, task = transfer.move, transfer.part, None
            try:
                transfer.segments = segments = part.names.segments(move.chunks)
                call = part.engine.load if verb == "load" else part.engine.save
                start = partial(call, segments, blocks=move.blocks, first_block=move.first_block, **part.memory)
                if transfer.ready is not None:
                    start = partial(start, ready=transfer.ready)
                if transfer.layers is not None:
                    start = partial(start, layer_events=transfer.layers, at_once=True)
                if segments:
                    with streams.current():
                        task = transfer.begin(start)
            except Exception as error:  # nothing of it may reach the engine
                transfer.failed = True
                log.warning("no %s began for request %s: %s", verb, one_line(move.request), one_line(error))
            if task is None:
                transfer.end()
            else:
                task.when_done(partial(self._over, transfer))

    def _over(self, transfer: Transfer) -> None:
        if transfer.layers is not None:
            transfer.layers.end()
        self._collect()  # first: the scheduler does not ask again for what it was told to be saved
        transfer.end()

    def _collect(self) -> None:
        try:
            self._changes.collect()
        except Exception as error:  # closed, for example
            log.debug("memory's changes are unknown: %s", one_line(error))

    def _touch(self, touched: Sequence[Chunks]) -> None:
        try:
            for chunks in touched:
                for part in self._parts[chunks.group]:
                    self._engine.touch(part.names.segments(chunks))
        except Exception as error:
            log.warning("the use of chunks could not be noted: %s", one_line(error))

    def _loaded(self, request: str, loads: Sequence[Transfer]) -> None:
        """Record the blocks of a request that did not get their KV, if it still wants it."""
        missing = set[int]().union(*(load.missing() for load in loads))
        if missing:
            self._failures += 1
            self._report.failed.add(request)
            if self._by_request:
                self._failed_requests.add(request)
            else:
                self._failed_blocks |= missing

    def _end_of(self, number: int, saves: Sequence[Transfer]) -> None:
        for save in saves:
            try:
                if save.task is not None:
                    save.task.result()
            except Exception as error:
                log.warning("save %d failed: %s", number, one_line(error))

    def _empty_memory(self) -> None:
        self.end_saves()
        memory = self._engine.memory
        if memory is not None:
            memory.remove(memory.chunks())
