"""Towards the engine: chunks in order, from memory or brought up from the fastest stored tier that gives them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvloom.contracts.observer import Event
from kvloom.format.envelope import ALIGN_BYTES
from kvloom.keys import leading
from kvloom.memory import pages_of
from kvloom.pipeline.locate import Search
from kvloom.runtime import Runtime
from kvloom.telemetry.events import EventBus
from kvloom.tiers.memory.tier import MemoryTier
from kvloom.tiers.request_context import RequestContext
from kvloom.tiers.stored import decoding
from kvloom.tiers.stored.inflight import Read, Wanted
from kvloom.tiers.stored.tier import StoredTier
from kvloom.tiers.tier import Layout, Loaded, Shape
from kvloom.types import ChunkKey, Segment, tokens_of

BEHIND = "behind a miss"
"""Why what comes after the first chunk that is nowhere is not given: it was not looked at."""

_WINDOW = 8
_WINDOW_BYTES = 64 << 20
"""Chunks on their way at once: so many of any length, and more as long as they have no more bytes than that."""

Pieces = Callable[[Segment], Sequence[Segment]]
"""Names what shorter sequences may have left of a segment."""
Runs = Generator[list[tuple[Segment, Loaded]], None, None]


@dataclass(slots=True)
class _Pending:
    """A segment on its way to the engine."""

    segment: Segment
    number: int
    """Its place in the request."""
    tiers: list[StoredTier] = field(default_factory=list)
    """Stored tiers from which it may be read, fastest first; those tried already are gone. Set before it is started."""
    loaded: Loaded | None = None
    read: Read | None = None
    source: StoredTier | None = None
    """The tier that it is being read from."""

    @property
    def came(self) -> bool:
        """There is nothing to wait for."""
        if self.read is None:
            return self.loaded is not None or not self.tiers
        return self.read.came

    def give_up(self) -> None:
        if self.loaded is not None:
            self.loaded.release()
        if self.read is not None:
            assert self.source is not None
            self.source.loads.give_up(self.read)


class Loader:
    """Reads chunks for the engine."""

    def __init__(
        self, memory: MemoryTier, stored: Sequence[StoredTier], layout: Layout, events: EventBus, runtime: Runtime
    ) -> None:
        """stored: fastest first."""
        self.memory = memory
        self.stored = tuple(stored)
        self.layout = layout
        self._events = events
        self._runtime = runtime

    def fetch(
        self, segments: Sequence[Segment], shape: Shape, context: RequestContext, *, gaps: bool,
        pieces: Pieces | None = None,
    ) -> Runs:  # fmt: skip
        """Runs of verified chunks, each in order, as soon as they are there; leased until the next is asked for.

        gaps: go on behind a segment that is nowhere to be had; otherwise stop at the first. Those that a slow tier has
        still to be asked about then come last. pieces: of that first one they come at the end, as far as they are
        somewhere. Chunks that came from stored tiers are in memory afterwards, if there is a memory tier.
        """
        waiting = deque(map(_Pending, segments, count()))
        if not waiting:
            return
        if pieces is not None:
            self.leave_time_for_pieces(context)
        search, _ = self.search(segments, context)
        first = waiting[0].segment
        nbytes = self.layout.nbytes(shape(first.end - first.start))
        window = self.window(nbytes)
        if context.device is not None and any(tier.serializer.decodes_on(context.device) for tier in self.stored):
            window = max(1, min(window, decoding.MOST_BYTES // 2 // pages_of(nbytes)))
        later: deque[_Pending] = deque()
        started: deque[_Pending] = deque()
        run: list[tuple[Segment, Loaded]] = []
        last = 0
        lost: _Pending | None = None
        why = ""
        try:
            while waiting or later or started or lost is not None:
                if later and not waiting and search.knows(later[0].segment.key):
                    waiting, later = later, waiting
                if len(started) <= window // 2:  # not one by one: many at once are read in fewer calls
                    fresh: list[_Pending] = []
                    while waiting and len(started) + len(fresh) < window:
                        if search.knows(waiting[0].segment.key):
                            fresh.append(waiting.popleft())
                            fresh[-1].tiers = search.tiers(fresh[-1].segment.key)
                        elif gaps:  # the silence of a slow tier must not use up the time of the others
                            later.append(waiting.popleft())
                        else:
                            break
                    if fresh:
                        started += fresh
                        self._start(fresh, shape, context)
                if run and (len(run) >= window or not started or not started[0].came or started[0].number < last):
                    yield run  # what is here need not wait for what is not, and nothing waits holding a lease
                    for _, loaded in run:
                        loaded.release()
                    run = []
                if not started and (waiting or later):
                    if not waiting:
                        waiting, later = later, waiting
                    search.wait()
                    continue
                if lost is not None and not started:
                    path: list[Segment] = []
                    if pieces is not None and not context.given_up:
                        search.close()
                        path, search = self.held(pieces(lost.segment), lost.segment.start, context)
                    self.missed([lost.segment], why, served=path)
                    waiting.extend(map(_Pending, path, count(len(segments))))
                    lost = pieces = None
                    continue
                pending = started[0]
                arrived = self._finish(pending, shape, context)
                started.popleft()
                if arrived is not None:
                    run.append((pending.segment, arrived))
                    last = pending.number
                    continue
                reason = self.why(pending.segment.key, context)
                if pieces is None or (lost is not None and lost.number < pending.number):
                    self.missed([pending.segment], reason)
                else:
                    if lost is not None:
                        self.missed([lost.segment], why)
                    lost, why = pending, reason
                if not gaps or context.given_up:
                    self._give_up(started, waiting, later, context)
            if run:
                yield run
        finally:
            search.close()
            for _, loaded in run:
                loaded.release()
            if lost is not None:
                self.missed([lost.segment], why)
            self._give_up(started, waiting, later, context)

    def add_mapped(self, held: list[Loaded | None], segments: Sequence[Segment], shape: Shape) -> None:
        """Lease from a store's memory the segments that are None in `held`, if one store has mapped all of them."""
        lacking = [number for number, one in enumerate(held) if one is None]
        rest = [segments[number] for number in lacking]
        source = next((tier for tier in self.stored if tier.loads.maps(segment.key for segment in rest)), None)
        if source is not None:
            for number, one in zip(lacking, source.loads.lease_mapped(_wanted(rest, shape)), strict=True):
                held[number] = one

    def leave_time_for_pieces(self, context: RequestContext) -> None:
        """A tier that is silent about whole chunks leaves another one the time to be asked for pieces, and read."""
        if len(self.stored) > 1:
            context.keep_back(2)

    def held(self, pieces: Sequence[Segment], start: int, context: RequestContext) -> tuple[list[Segment], Search]:
        """The pieces that a tier has and that follow one another from `start` on, and their search. pieces: by ends."""
        context.keep_back(1)  # for reading them
        search, here = self.search(pieces, context)
        there = [
            piece for piece, held in zip(pieces, here, strict=True) if held or search.tiers(piece.key, hurried=True)
        ]
        path = leading(there, start)
        context.keep_back(0)
        context.record.found(path)
        return path, search

    def search(self, segments: Sequence[Segment], context: RequestContext) -> tuple[Search, list[bool]]:
        """A search for the segments that memory lacks, and a bool for each segment: memory holds it."""
        keys = [segment.key for segment in segments]
        here = self.memory.find(keys)
        return Search(self.stored, [key for key, held in zip(keys, here, strict=True) if not held], context), here

    def _give_up(
        self, started: deque[_Pending], waiting: deque[_Pending], later: deque[_Pending], context: RequestContext
    ) -> None:
        for pending in started:
            pending.give_up()
        rest = [pending.segment for pending in (*started, *waiting, *later)]
        self.missed(rest, "given up" if context.given_up else BEHIND)
        for some in (started, waiting, later):
            some.clear()

    def why(self, key: ChunkKey, context: RequestContext) -> str:
        """The miss reason of a chunk."""
        if context.given_up:
            return "given up"
        silent = any(tier.name in context.lost or tier.calls.reading.open for tier in self.stored)
        return context.misses.get(key) or ("no answer" if silent else "in no tier")

    def missed(self, segments: Sequence[Segment], reason: str, *, served: Sequence[Segment] = ()) -> None:
        """Emit a miss of these segments. served: pieces of them that are delivered."""
        if segments:
            num_tokens = tokens_of(segments) - tokens_of(served)
            self._events.emit(Event("missed", tokens=num_tokens, chunks=len(segments), reason=reason))

    def window(self, nbytes: int) -> int:
        """Return how many chunks of this size may be on their way at once: their buffers must fit beside each other."""
        fitting = self.memory.pool.capacity // 2 // (nbytes + 2 * ALIGN_BYTES)  # a framed blob: a header, whole pages
        return max(1, min(fitting, max(_WINDOW, _WINDOW_BYTES // max(1, nbytes))))

    def _start(self, some: Sequence[_Pending], shape: Shape, context: RequestContext) -> None:
        """Lease each chunk from memory, or begin to read it from the next tier that may have it."""
        for pending, held in zip(some, self.memory.lease([one.segment.key for one in some]), strict=True):
            pending.loaded = held
        while lacking := [one for one in some if one.loaded is None and one.read is None and one.tiers]:
            source = lacking[0].tiers[0]
            these = [one for one in lacking if one.tiers[0] is source]
            found = source.loads.fetch(_wanted([one.segment for one in these], shape), context)
            for pending, one in zip(these, found, strict=True):
                pending.source = pending.tiers.pop(0)
                if isinstance(one, Loaded):
                    pending.loaded = one
                else:
                    pending.read = one

    def _finish(self, pending: _Pending, shape: Shape, context: RequestContext) -> Loaded | None:
        """Wait for a chunk; if its tier does not deliver it, read it from the next."""
        while pending.loaded is None and pending.read is not None:
            source, read, pending.read = pending.source, pending.read, None
            assert source is not None
            loaded = source.loads.collect(read)
            if loaded is not None and loaded.lease.store and context.into_memory:
                loaded.release()  # of somebody who does not want it in memory, whose read was shared
                pending.tiers.insert(0, source)
            elif loaded is not None:
                context.progress()
                context.record.gave(source.name, pending.segment.end - pending.segment.start)
                self.promote(pending.segment, loaded, context, below=source)
                return loaded
            self._start([pending], shape, context)
        if pending.loaded is not None:
            context.record.gave(
                pending.loaded.lease.store or self.memory.name, pending.segment.end - pending.segment.start
            )
        return pending.loaded

    def promote(self, segment: Segment, loaded: Loaded, context: RequestContext, *, below: StoredTier) -> None:
        """Write a chunk that came from a slow tier to the faster stored ones. A lossy one stays in memory only."""
        if self.memory.keep and not loaded.lease.store:
            self._events.emit(Event("promoted", self.memory.name, loaded.chunk.num_tokens, 1, loaded.chunk.nbytes))
        if not loaded.chunk.exact:
            return
        for tier in self.stored[: self.stored.index(below)]:
            if tier.policy.write == "through" and tier.lacks(segment.key, loaded.written):
                tier.submit(
                    segment.key, loaded.again(), until=self._runtime.now(), since=context.since, chain=context.chain,
                    record=context.record,
                )  # fmt: skip


def _wanted(segments: Sequence[Segment], shape: Shape) -> list[Wanted]:
    lengths = [segment.end - segment.start for segment in segments]
    shapes = {num_tokens: tuple(shape(num_tokens)) for num_tokens in set(lengths)}
    return [
        Wanted(segment.key, shapes[num_tokens], num_tokens)
        for segment, num_tokens in zip(segments, lengths, strict=True)
    ]
