"""Reading ahead, layer by layer: which part of which chunk is read next, how many at once, and into what memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvloom.errors import DeadlineExceeded
from kvloom.memory import Reservation
from kvloom.pipeline.stack import Stack
from kvloom.runtime import Call, Runtime
from kvloom.tiers.request_context import RequestContext
from kvloom.tiers.stored.inflight import InflightRead, Piece, Read, Wanted
from kvloom.tiers.stored.layer_ranges import LayerBuffer, LayeredBlob, layer_bytes
from kvloom.tiers.stored.tier import StoredTier
from kvloom.tiers.tier import Loaded
from kvloom.types import Segment


class Prefix:
    """Number of leading chunks that are good in each layer. It never grows from layer to layer."""

    def __init__(self, chunks: int, layers: int, runtime: Runtime) -> None:
        self._ends = [chunks] * layers
        self._lock = runtime.lock()

    def count(self, layer: int) -> int:
        """Return how many leading chunks have this layer and all before it."""
        return self._ends[layer]

    def cut(self, chunk: int, layer: int) -> None:
        """From `layer` on, `chunk` and all that follow are not good."""
        with self._lock:
            self._ends[layer:] = [min(end, chunk) for end in self._ends[layer:]]


@dataclass(slots=True, eq=False)
class Incoming:
    """A chunk on its way to the engine."""

    index: int
    segment: Segment
    shape: tuple[int, ...]
    tiers: list[StoredTier]
    """Stored tiers where it may be, fastest first; it is read from the first."""
    in_memory: bool = False
    """It was found in memory, and no stored tier was asked for it."""
    by_layer: bool = False
    """It is read layer by layer, in ranges; else whole."""
    asked: bool = False
    """It was asked for whole."""
    loaded: Loaded | None = None
    elsewhere: Read | None = None
    """Somebody was reading it whole when its turn came."""
    alone: bool = False
    """And that came to nothing: it is read by layers after all."""
    blob: LayeredBlob | None = None
    inflight: InflightRead | None = None
    """The read that joins all of its layers, for other requests, if there is room for that."""
    passing: LayerBuffer | None = None
    """Else: where the layers that have just arrived are."""
    began: float = 0.0
    over: bool = False
    """Its last layer was handed on."""

    @property
    def num_tokens(self) -> int:
        return self.segment.end - self.segment.start


@dataclass(frozen=True, slots=True)
class _PartRead:
    tier: StoredTier
    piece: Piece
    place: LayerBuffer


class ReadAhead:
    """The reads of one load, asked for in the order in which they are taken. For one thread.

    A tier that fails for one chunk is still read for the chunks before it, whose loaded layers are of no use without
    the next.
    """

    def __init__(
        self, stack: Stack, chunks: Sequence[Incoming], groups: Sequence[range], prefix: Prefix,
        context: RequestContext, runtime: Runtime,
    ) -> None:  # fmt: skip
        self._stack = stack
        self._chunks = chunks
        self._groups = groups
        self._prefix = prefix
        self._context = context
        self._runtime = runtime
        self._positions = ((group, chunk) for group in groups for chunk in chunks)
        self._next: tuple[range, Incoming] | None = None
        self._parts: dict[tuple[int, int], _PartRead] = {}
        self._wholes: dict[int, Read] = {}
        self._spare: list[Reservation] = []
        # For what others were to read, if that comes to nothing; and the same while it is in use.
        self._aside: Reservation | None = None
        self._lent: Reservation | None = None
        self._reserved = 0
        self._group_bytes = 0

    def prepare(self) -> None:
        """Reserve the least memory that reading by layers needs, before anything is held, so that waiting is safe."""
        streamed = [one for one in self._chunks if one.by_layer]
        if not streamed:
            return
        longest, dtype = max(map(len, self._groups)), self._stack.layout.dtype
        self._group_bytes = max(one.shape[0] * longest * layer_bytes(one.shape, dtype) for one in streamed)
        context = self._context
        reservation = self._stack.memory.reserve_by(self._group_bytes, context.until, stopped=lambda: context.given_up)
        if reservation is not None:
            self._spare.append(reservation)
            self._reserved = 1

    def ready(self, chunk: Incoming, group: range) -> bool:
        """Return whether taking this needs no waiting."""
        if chunk.elsewhere is not None:
            return chunk.elsewhere.came and self._lent is None
        read = self._wholes.get(chunk.index)
        if read is not None:
            return read.came
        part = self._parts.get((group.start, chunk.index))
        return chunk.loaded is not None if part is None else part.piece.call.done

    def part(self, chunk: Incoming, group: range) -> tuple[LayerBuffer, int] | None:
        """Return the place of the layers of `group`, and the number of right ones; None if they cannot be had this way.

        Asked for by `fill` before, and by none in between: that may find the chunk elsewhere.
        """
        part = self._parts.pop((group.start, chunk.index), None)
        if part is None and chunk.alone and self._wanted(chunk, group):
            self._ask_by_layer(chunk, group)  # its turn to be asked for went by while another read it
            part = self._parts.pop((group.start, chunk.index), None)
        if part is None:
            return None
        call = part.piece.call
        if not self._wait(call, part.tier, chunk, group) and self._wanted(chunk, group):
            late = DeadlineExceeded("no answer within the deadline")
            part.tier.calls.late("read", late, call, part.tier.calls.reading)
        arrived = call.peek()
        if arrived is None:
            self._context.lost.add(part.tier.name)
            self._lose(part, chunk, group.start)
            return None
        self._context.progress()
        chunk.blob = arrived[0] or chunk.blob
        right = part.piece.right(group)
        if chunk.inflight is None:
            chunk.passing = part.place
        elif right < len(group):
            chunk.inflight.home.close(chunk.inflight)
        self.fill()
        return part.place, right

    def whole(self, chunk: Incoming, group: range) -> Loaded | None:
        """The chunk, all of it, from the first of its tiers."""
        tier = chunk.tiers[0]
        read = self._wholes.pop(chunk.index, None) or self._read_whole(chunk)
        if read is None:
            return None
        read.wait(self._context.patience(tier.deadline), stopped=lambda: not self._wanted(chunk, group))
        if not self._wanted(chunk, group):
            tier.loads.give_up(read)
            return None
        return self._landed(tier, read)

    def from_elsewhere(self, chunk: Incoming, group: range) -> Loaded | None:
        """Return the chunk that another request was reading whole; None to read it by layers after all."""
        read, chunk.elsewhere = chunk.elsewhere, None
        assert read is not None
        tier, inflight = chunk.tiers[0], read.inflight
        chunk.alone = True

        def stopped() -> bool:
            # What this load holds may be what the other waits for.
            return not self._wanted(chunk, group) or (inflight.starved and self._holds_memory())

        if not read.wait(self._context.patience(tier.deadline), stopped=stopped) and stopped():
            tier.loads.give_up(read)
            return None
        return self._landed(tier, read)

    def _landed(self, tier: StoredTier, read: Read) -> Loaded | None:
        loaded = tier.loads.collect(read)
        if loaded is not None:
            self._context.progress()
        self.fill()
        return loaded

    def _holds_memory(self) -> bool:
        return any(chunk.loaded is not None or chunk.inflight is not None for chunk in self._chunks)

    def _wait(self, call: Call[Any], tier: StoredTier, chunk: Incoming, group: range) -> bool:
        """Return whether the call was done in time, and while anybody wanted it."""
        return call.wait(self._context.patience(tier.deadline), stopped=lambda: not self._wanted(chunk, group))

    def done_with(self, chunk: Incoming) -> None:
        """Release chunks that were only in passing."""
        place, chunk.passing = chunk.passing, None
        if place is None:
            return
        if place.reservation is self._lent:
            self._aside, self._lent = place.reservation, None
        else:
            self._spare.append(place.reservation)

    def forget(self, chunk: Incoming) -> None:
        """Nothing more of this chunk is wanted by layers: give up what is under way, and its memory."""
        self.done_with(chunk)
        inflight, chunk.inflight = chunk.inflight, None
        for key in [key for key in self._parts if key[1] == chunk.index]:
            part = self._parts.pop(key)
            if inflight is None:
                self._lose(part, chunk, key[0])
        if inflight is not None:
            inflight.home.leave(inflight)

    def close(self) -> None:
        """Give everything up."""
        for chunk in self._chunks:
            self.forget(chunk)
            if chunk.elsewhere is not None:
                chunk.tiers[0].loads.give_up(chunk.elsewhere)
                chunk.elsewhere = None
        for index, read in self._wholes.items():
            self._chunks[index].tiers[0].loads.give_up(read)
        for reservation in (*self._spare, *filter(None, [self._aside])):
            reservation.abandon()
        self._wholes, self._spare, self._aside = {}, [], None

    def fill(self) -> None:
        """Ask for what comes next, as much as may be under way at once."""
        for start, index in [key for key in self._parts if self._prefix.count(key[0]) <= key[1]]:
            self._lose(self._parts.pop((start, index)), self._chunks[index], start)
        while not self._context.given_up:
            if self._next is None:
                self._next = next(self._positions, None)
            if self._next is None:
                return
            group, chunk = self._next
            if self._wanted(chunk, group) and self._comes_from_below(chunk, group) and not self._ask(chunk, group):
                return
            self._next = None

    def _wanted(self, chunk: Incoming, group: range) -> bool:
        return not self._context.given_up and self._prefix.count(group.start) > chunk.index

    def _comes_from_below(self, chunk: Incoming, group: range) -> bool:
        """A chunk that is read whole is asked for once, and no longer by layers."""
        first = not chunk.asked and (chunk.by_layer or not group.start)
        here = chunk.loaded is not None or chunk.elsewhere is not None
        return first and not here and not chunk.over and bool(chunk.tiers)

    def _ask(self, chunk: Incoming, group: range) -> bool:
        """Begin to read; False if there is no room for it now, or not everything known that it takes."""
        if not group.start and chunk.inflight is None and self._is_in_memory(chunk):
            return True
        if chunk.by_layer:
            under_way = len(self._parts) >= 2 * chunk.tiers[0].backend.threads
            return not under_way and self._ask_by_layer(chunk, group)
        window = self._stack.loader.window(self._stack.layout.nbytes(chunk.shape))
        if len(self._wholes) > window // 2:  # not one by one: many at once are read in fewer calls
            return False
        tier = chunk.tiers[0]
        behind = (one for one in self._chunks[chunk.index :] if self._comes_whole(one, group, tier))
        some = list(islice(behind, window - len(self._wholes)))
        for one, found in zip(some, tier.loads.fetch([_wanted(one) for one in some], self._context), strict=True):
            one.asked = True
            if isinstance(found, Loaded):
                one.loaded = found
            elif found is not None:
                self._wholes[one.index] = found
        return True

    def _comes_whole(self, chunk: Incoming, group: range, tier: StoredTier) -> bool:
        here = self._wanted(chunk, group) and self._comes_from_below(chunk, group)
        return here and not chunk.by_layer and chunk.tiers[0] is tier

    def _ask_by_layer(self, chunk: Incoming, group: range) -> bool:
        tier, start = chunk.tiers[0], group.start
        if not start and chunk.inflight is None and not chunk.alone:
            self._join(chunk)
            if chunk.elsewhere is not None:
                return True
            if self._is_in_memory(chunk):
                self.forget(chunk)
                return True
        inflight = chunk.inflight
        if inflight is not None:
            chunk.blob = chunk.blob or inflight.blob
        if start and chunk.blob is None:
            return False
        chunk.began = chunk.began or self._runtime.now()
        if inflight is not None:
            assert inflight.place is not None
            piece = tier.loads.inflight.ask(inflight, group)
            if piece is not None:
                self._parts[start, chunk.index] = _PartRead(tier, piece, inflight.place)
            return True
        place = self._passing(chunk, group)
        if place is None:
            return False
        call = tier.loads.begin(chunk.segment.key, chunk.blob, place, chunk.num_tokens, group)
        if call is None:
            self._let_go(place)
        else:
            self._parts[start, chunk.index] = _PartRead(tier, Piece(call, group), place)
        return True

    def _is_in_memory(self, chunk: Incoming) -> bool:
        """Lease it if somebody has brought it there meanwhile."""
        chunk.loaded = self._stack.memory.lease([chunk.segment.key])[0]
        return chunk.loaded is not None

    def _join(self, chunk: Incoming) -> None:
        """Join a read of this chunk that is under way; else begin a shared one, if there is room for the whole chunk.

        A read that has just ended is in memory: look there afterwards.
        """
        tier, groups, context = chunk.tiers[0], self._groups, self._context
        wanted = _wanted(chunk)
        found = tier.loads.inflight.join(wanted, groups, context)
        if found is None:
            reservation = self._stack.memory.stage(self._stack.layout.nbytes(chunk.shape))
            if reservation is None:
                return
            place = LayerBuffer.of(reservation, chunk.shape, self._stack.layout.dtype)
            found = tier.loads.inflight.join(wanted, groups, context, place=place)
            if found is None or found.place is not place:
                reservation.abandon()
        if found is not None and found.call is None:
            chunk.inflight = found
        elif found is not None and self._has_a_way_out():
            chunk.elsewhere = Read(found, context)
        elif found is not None:
            found.home.leave(found)

    def _has_a_way_out(self) -> bool:
        """Return whether this can wait for a read that may itself be waiting for memory held here."""
        if self._aside is None and self._lent is None and self._holds_memory():
            self._aside = self._stack.memory.reserve(self._group_bytes)
            return self._aside is not None
        return True

    def _read_whole(self, chunk: Incoming) -> Read | None:
        chunk.asked = True
        return chunk.tiers[0].loads.read(_wanted(chunk), self._context)

    def _passing(self, chunk: Incoming, group: range) -> LayerBuffer | None:
        """Memory for these layers only, until they are handed on."""
        if not self._spare and self._reserved < 2 * chunk.tiers[0].backend.threads:
            reservation = self._stack.memory.reserve(self._group_bytes)
            if reservation is not None:
                self._reserved += 1
                self._spare.append(reservation)
        if not self._spare and chunk.alone and self._aside is not None:
            self._spare.append(self._aside)
            self._aside, self._lent = None, self._aside
        if not self._spare:
            return None
        return LayerBuffer.of(self._spare.pop(), chunk.shape, self._stack.layout.dtype, group)

    def _lose(self, part: _PartRead, chunk: Incoming, start: int) -> None:
        """Give up a read that may be under way; it keeps its memory until it returns."""
        if chunk.inflight is not None:
            group = next(group for group in self._groups if group.start == start)
            chunk.inflight.home.give_up(chunk.inflight, group)
            return
        part.piece.call.cancel()
        self._let_go(part.place)

    def _let_go(self, place: LayerBuffer) -> None:
        place.reservation.abandon()
        if place.reservation is self._lent:
            self._lent = None
        else:
            self._reserved -= 1


def _wanted(chunk: Incoming) -> Wanted:
    return Wanted(chunk.segment.key, chunk.shape, chunk.num_tokens)
