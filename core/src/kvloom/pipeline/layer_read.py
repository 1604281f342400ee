"""Chunks on their way to the engine layer by layer: the first layer of all of them before the second of any."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvloom.contracts.observer import Event
from kvloom.pipeline.load import Pieces
from kvloom.pipeline.readahead import Incoming, Prefix, ReadAhead
from kvloom.pipeline.stack import Stack
from kvloom.runtime import Runtime
from kvloom.telemetry.events import EventBus
from kvloom.tiers.request_context import RequestContext
from kvloom.tiers.stored.layer_ranges import WHOLE_BYTES, groups, layer_bytes, reads_ranges
from kvloom.tiers.tier import Loaded, Shape
from kvloom.types import Chunk, Hit, Segment

_RUN = 64
"""At most so many chunks are handed on at once."""


@dataclass(frozen=True, slots=True)
class Part:
    """Verified layers of one chunk: `chunk.tensor` is `[planes, len(layers), tokens, hidden]`."""

    index: int
    """Index of the segment."""
    segment: Segment
    layers: range
    chunk: Chunk

    def layer(self, layer: int) -> Chunk:
        """One layer of it, as connectors take it."""
        return layer_of(self.chunk, layer - self.layers.start)


def layer_of(chunk: Chunk, layer: int) -> Chunk:
    """A view of one layer of a chunk, `[planes, 1, tokens, hidden]`."""
    return Chunk(chunk.tensor[:, layer : layer + 1], chunk.format, chunk.num_tokens, chunk.fidelity, chunk.start)


class LayerRead:
    """One load: what the tiers are believed to hold, then its parts, group of layers by group, for one thread."""

    def __init__(
        self, stack: Stack, segments: Sequence[Segment], shape: Shape, context: RequestContext, *, runtime: Runtime,
        events: EventBus, pieces: Pieces | None = None,
    ) -> None:  # fmt: skip
        """Asks the tiers what they hold; reads nothing yet.

        A tier that does not answer soon is given up, if there is something to be read from faster ones meanwhile.
        """
        self._stack = stack
        self._runtime = runtime
        self._events = events
        self._context = context
        self._chunks: list[Incoming] = []
        self.whole = len(segments)
        """Number of leading segments that were asked for and found; what is read behind them are pieces of the next."""
        self.hit = self._locate(segments, shape, pieces)
        self.num_layers = int(shape(1)[1])
        self.prefix = Prefix(len(self._chunks), self.num_layers, runtime)
        for chunk in self._chunks:
            chunk.by_layer = self._can_come_by_layer(chunk)
        dtype = stack.layout.dtype
        steps = [layer_bytes(chunk.shape, dtype) for chunk in self._chunks if chunk.by_layer]
        self.groups = groups(self.num_layers, max(steps, default=0))
        self._ahead = ReadAhead(stack, self._chunks, self.groups, self.prefix, context, runtime)
        self._at_once = False

    @property
    def segments(self) -> list[Segment]:
        """Those that are to be read, in order."""
        return [chunk.segment for chunk in self._chunks]

    def _locate(self, segments: Sequence[Segment], shape: Shape, pieces: Pieces | None) -> Hit:
        """Find the tiers of the leading segments, up to the first that is nowhere, and of the pieces of that one."""
        memory, stored, by_tier = self._stack.memory, self._stack.stored, dict[str, int]()
        if pieces is not None:
            self._stack.loader.leave_time_for_pieces(self._context)
        search, held = self._stack.loader.search(segments, self._context)
        waiting = deque(zip(segments, held, strict=True))
        try:
            while waiting:
                segment, here = waiting.popleft()
                tiers = list(stored) if here else search.tiers(segment.key, hurried=bool(self._chunks))
                if not (here or tiers):
                    self.whole = min(self.whole, len(self._chunks))
                    if pieces is None:
                        break
                    search.close()
                    path, search = self._stack.loader.held(pieces(segment), segment.start, self._context)
                    here_too = memory.find([piece.key for piece in path])
                    waiting, pieces = deque(zip(path, here_too, strict=True)), None
                    continue
                name, num_tokens = memory.name if here else tiers[0].name, segment.end - segment.start
                by_tier[name] = by_tier.get(name, 0) + num_tokens
                self._chunks.append(Incoming(len(self._chunks), segment, tuple(shape(num_tokens)), tiers, here))
        finally:
            search.close()
        return Hit(sum(by_tier.values()), by_tier)

    def _can_come_by_layer(self, chunk: Incoming) -> bool:
        if not chunk.tiers or self._stack.layout.nbytes(chunk.shape) <= WHOLE_BYTES:
            return False
        tier = chunk.tiers[0]
        return tier.serializer.by_layer and reads_ranges(tier.backend)

    def begin(self) -> None:
        """Lease what is in memory. What else is missing is read from now on."""
        self._context.progress()
        self._ahead.prepare()
        held = self._stack.memory.lease([chunk.segment.key for chunk in self._chunks])
        for chunk, loaded in zip(self._chunks, held, strict=True):
            chunk.loaded = loaded
            if loaded is None and chunk.in_memory:  # evicted since: whichever tier has it may have it whole only
                chunk.by_layer = False
        # A chunk that is read whole needs room for all of it, so that what is held must be given back soon; and no
        # layer is complete before it is there anyway.
        self._at_once = any(chunk.loaded is None and not chunk.by_layer for chunk in self._chunks)

    def runs(self, group: range) -> Iterator[list[Part]]:
        """The chunks' layers of `group`, in order, as soon as they are there; valid until the next run is asked for.

        A part may have more layers, if they came with it, or fewer, if the rest could not be had: `prefix` says so.
        """
        run: list[Part] = []
        for chunk in self._chunks:
            if chunk.over:
                continue
            if self._context.given_up or self.prefix.count(group.start) <= chunk.index:
                break
            if run and (len(run) >= _RUN or not self._ahead.ready(chunk, group)):
                yield run
                self._handed_on(run)
                run = []
            part = self._take(chunk, group)
            if part is None:
                break
            if run and part.layers != run[0].layers:
                yield run
                self._handed_on(run)
                run = []
            run.append(part)
        if run:
            yield run
            self._handed_on(run)

    def drop_damaged(self, run: Sequence[Part]) -> None:
        """After a run was moved: the prefix ends before chunks whose memory changed meanwhile."""
        for part in run:
            loaded = self._chunks[part.index].loaded
            if loaded is not None and not loaded.lease.intact:
                self.prefix.cut(part.index, part.layers.start)

    def wake(self) -> None:
        """Have `runs` look again what is still wanted. From any thread."""
        for tier in self._stack.stored:
            tier.calls.reads.wake()

    def close(self) -> None:
        """Give back everything; what is under way keeps its memory until it returns."""
        self._ahead.close()
        for chunk in self._chunks:
            loaded, chunk.loaded = chunk.loaded, None
            if loaded is not None:
                loaded.release()

    def _take(self, chunk: Incoming, group: range) -> Part | None:
        """As many layers of the group as there are; the prefix ends before what is not there."""
        self._ahead.fill()
        if chunk.elsewhere is not None:
            chunk.loaded = self._ahead.from_elsewhere(chunk, group)
            if chunk.loaded is not None:
                self._stack.loader.promote(chunk.segment, chunk.loaded, self._context, below=chunk.tiers[0])
        if chunk.loaded is None and chunk.by_layer:
            arrived = self._ahead.part(chunk, group)
            place, right = (None, 0) if arrived is None else arrived
            if place is not None and right == len(group):
                return self._part(chunk, group, place.layers(group))
            layers = range(group.start, group.start + right)
            loaded = self._read_whole(chunk, group)
            if loaded is None:
                self.prefix.cut(chunk.index, layers.stop)
                return self._part(chunk, layers, place.layers(layers)) if place is not None and right else None
            self._ahead.forget(chunk)
            chunk.by_layer, chunk.loaded = False, loaded
            return self._held_part(chunk, loaded, range(group.start, self.num_layers))
        if chunk.loaded is None:
            chunk.loaded = self._read_whole(chunk, group)
        if chunk.loaded is None:
            self.prefix.cut(chunk.index, group.start)
            return None
        return self._held_part(chunk, chunk.loaded, range(group.start, self.num_layers) if self._at_once else group)

    def _read_whole(self, chunk: Incoming, group: range) -> Loaded | None:
        """The chunk from the first of its tiers that can give it."""
        while chunk.tiers and not self._context.given_up and self.prefix.count(group.start) > chunk.index:
            tier = chunk.tiers[0]
            loaded = self._ahead.whole(chunk, group)
            if loaded is not None:
                before = None if chunk.blob is None or not group.start else chunk.blob.header.description.fidelity
                if before in (None, loaded.chunk.fidelity):
                    self._stack.loader.promote(chunk.segment, loaded, self._context, below=tier)
                    return loaded
                loaded.release()  # the engine has other layers of it, of another fidelity
            chunk.tiers.pop(0)
        return None

    def _part(self, chunk: Incoming, layers: range, tensor: torch.Tensor) -> Part:
        assert chunk.blob is not None
        about = chunk.blob.header.description
        of = Chunk(tensor, self._stack.layout.format, chunk.num_tokens, about.fidelity, about.start)
        return Part(chunk.index, chunk.segment, layers, of)

    def _held_part(self, chunk: Incoming, loaded: Loaded, layers: range) -> Part:
        whole = loaded.chunk
        tensor = whole.tensor[:, layers.start : layers.stop]
        of = Chunk(tensor, whole.format, whole.num_tokens, whole.fidelity, whole.start)
        return Part(chunk.index, chunk.segment, layers, of)

    def _handed_on(self, run: Sequence[Part]) -> None:
        for part in run:
            chunk = self._chunks[part.index]
            self._ahead.done_with(chunk)
            if part.layers.stop == self.num_layers:
                chunk.over = True
                if chunk.loaded is None:
                    self._complete(chunk)
                else:
                    chunk.loaded.release()
                    chunk.loaded = None

    def _complete(self, chunk: Incoming) -> None:
        """All layers of a chunk have come by ranges, and were verified: keep it in memory, if it was put together."""
        tier, inflight, blob = chunk.tiers[0], chunk.inflight, chunk.blob
        assert blob is not None
        if inflight is None:
            nbytes = blob.header.header_bytes + blob.header.payload_bytes
            ended = self._runtime.now()
            self._context.record.note("read", tier.name, chunk.began, ended, nbytes=nbytes)
            self._events.emit(Event("retrieved", tier.name, chunk.num_tokens, 1, nbytes, ended - chunk.began))
            return
        chunk.inflight = None
        loaded, first = tier.loads.complete(inflight, self._context)
        if first and not self._stack.memory.invalidations.hit(inflight.key, inflight.since):
            self._stack.loader.promote(chunk.segment, loaded, self._context, below=tier)
        loaded.release()
        inflight.home.leave(inflight)
