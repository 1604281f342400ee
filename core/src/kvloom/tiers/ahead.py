"""Reading ahead, layer by layer: which part of which chunk is read next, how many at once, and into what memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvloom import envelope
from kvloom.errors import CorruptBlobError, DeadlineExceeded
from kvloom.runtime import Call, Runtime
from kvloom.tiers.base import Loaded
from kvloom.tiers.flights import Read
from kvloom.tiers.layer_blobs import read_layers
from kvloom.tiers.rooms import Place, Room, layer_bytes
from kvloom.tiers.stack import Stack
from kvloom.tiers.stored import StoredTier
from kvloom.tiers.visit import Visit
from kvloom.types import Segment

_WHOLES = 8
"""At most so many chunks are read whole at once."""


class Prefix:
    """How many leading chunks are good in each layer: fewer from layer to layer, and never more again."""

    def __init__(self, chunks: int, layers: int, runtime: Runtime) -> None:
        self._ends = [chunks] * layers
        self._lock = runtime.lock()

    def count(self, layer: int) -> int:
        """How many leading chunks have this layer and all before it."""
        return self._ends[layer]

    def cut(self, chunk: int, layer: int) -> None:
        """From `layer` on, `chunk` and all that follow are not good."""
        with self._lock:
            self._ends[layer:] = [min(end, chunk) for end in self._ends[layer:]]

    def layers_of(self, chunk: int, layers: range) -> range:
        """Those of `layers` in which `chunk` is good: the first ones."""
        stop = next((layer for layer in layers if self._ends[layer] <= chunk), layers.stop)
        return range(layers.start, stop)


@dataclass(slots=True, eq=False)
class Incoming:
    """A chunk on its way to the engine."""

    index: int
    segment: Segment
    shape: tuple[int, ...]
    tiers: list[StoredTier]
    """Stored tiers where it may be, fastest first; it is read from the first."""
    by_layer: bool = False
    """It is read layer by layer, in ranges; else whole."""
    asked: bool = False
    """It was asked for whole."""
    loaded: Loaded | None = None
    header: envelope.Header | None = None
    place: Place | None = None
    """Where all of its layers are put together, if the chunk is to stay in memory."""
    passing: Place | None = None
    """Else: where the layers that have just arrived are."""
    began: float = 0.0
    over: bool = False
    """Its last layer was handed on."""

    @property
    def num_tokens(self) -> int:
        return self.segment.end - self.segment.start


Arrived = tuple[envelope.Header | None, int]
"""The header of a blob that has layers, and how many of those that were asked for are right."""


@dataclass(frozen=True, slots=True)
class _Piece:
    tier: StoredTier
    call: Call[Arrived | None]
    place: Place


class Ahead:
    """The reads of one load, asked for in the order in which they are taken. For one thread.

    A tier that fails for one chunk is still read for those before it: without their next layers the layers that they
    have are worth nothing.
    """

    def __init__(
        self, stack: Stack, chunks: Sequence[Incoming], groups: Sequence[range], prefix: Prefix, visit: Visit,
        runtime: Runtime,
    ) -> None:  # fmt: skip
        self._stack = stack
        self._chunks = chunks
        self._groups = groups
        self._prefix = prefix
        self._visit = visit
        self._runtime = runtime
        self._positions = self._all_positions()
        self._next: tuple[range, Incoming] | None = None
        self._pieces: dict[tuple[int, int], _Piece] = {}
        self._wholes: dict[int, Read] = {}
        self._spare: list[Room] = []
        self._rooms = 0
        self._room_bytes = 0

    def prepare(self) -> None:
        """Get the memory that reading by layers takes at least: while nothing is held, so that waiting is safe."""
        streamed = [one for one in self._chunks if one.by_layer]
        if not streamed:
            return
        longest, dtype = max(map(len, self._groups)), self._stack.layout.dtype
        self._room_bytes = max(one.shape[0] * longest * layer_bytes(one.shape, dtype) for one in streamed)
        visit = self._visit
        room = self._stack.rooms.await_passing(self._room_bytes, visit.until, stopped=lambda: visit.given_up)
        if room is not None:
            self._spare.append(room)
            self._rooms = 1

    def ready(self, chunk: Incoming, group: range) -> bool:
        """Whether taking this needs no waiting."""
        whole, piece = self._wholes.get(chunk.index), self._pieces.get((group.start, chunk.index))
        if whole is None and piece is None:
            return chunk.loaded is not None
        return whole.done if whole is not None else piece is not None and piece.call.done

    def part(self, chunk: Incoming, group: range) -> tuple[Place, int] | None:
        """Where the layers of `group` are, and how many of them are right; None if they are not to be had so."""
        self.fill()
        piece = self._pieces.pop((group.start, chunk.index), None)
        if piece is None:
            return None
        if not self._wait(piece.call, piece.tier, chunk, group) and self._wanted(chunk, group):
            late = DeadlineExceeded("no answer within the deadline")
            piece.tier.calls.late("read", late, piece.call, piece.tier.calls.reading)
        arrived = piece.call.peek()
        if arrived is None:
            self._visit.lost.add(piece.tier.name)
            self._lose(piece, chunk)
            return None
        self._visit.progress()
        header, right = arrived
        chunk.header = header or chunk.header
        if piece.place is not chunk.place:
            chunk.passing = piece.place
        self.fill()
        return piece.place, right

    def whole(self, chunk: Incoming, group: range) -> Loaded | None:
        """The chunk, all of it, from the first of its tiers."""
        tier = chunk.tiers[0]
        read = self._wholes.pop(chunk.index, None) or self._read_whole(chunk)
        if read is None:
            return None
        self._wait(read.flight.call, tier, chunk, group)
        if not self._wanted(chunk, group):
            tier.give_up(read)
            return None
        loaded = tier.collect(read)
        if loaded is not None:
            self._visit.progress()
        self.fill()
        return loaded

    def _wait(self, call: Call[Any], tier: StoredTier, chunk: Incoming, group: range) -> bool:
        """Whether the call was done in time, and while anybody wanted it."""
        return call.wait(self._visit.patience(tier.deadline), stopped=lambda: not self._wanted(chunk, group))

    def done_with(self, chunk: Incoming) -> None:
        """What was in passing is no longer needed."""
        place, chunk.passing = chunk.passing, None
        if place is not None:
            self._spare.append(place.room)

    def forget(self, chunk: Incoming) -> None:
        """Nothing more of this chunk is wanted by layers: give up what is under way, and its memory."""
        self.done_with(chunk)
        for key in [key for key in self._pieces if key[1] == chunk.index]:
            self._lose(self._pieces.pop(key), chunk)
        place, chunk.place = chunk.place, None
        if place is not None:
            place.room.release()

    def close(self) -> None:
        """Give everything up."""
        for chunk in self._chunks:
            self.forget(chunk)
        for index, read in self._wholes.items():
            self._chunks[index].tiers[0].give_up(read)
        for room in self._spare:
            room.release()
        self._wholes, self._spare = {}, []

    def fill(self) -> None:
        """Ask for what comes next, as much as may be under way at once."""
        for start, index in [key for key in self._pieces if self._prefix.count(key[0]) <= key[1]]:
            self._lose(self._pieces.pop((start, index)), self._chunks[index])
        while not self._visit.given_up:
            if self._next is None:
                self._next = next(self._positions, None)
            if self._next is None:
                return
            group, chunk = self._next
            if self._wanted(chunk, group) and self._comes_from_below(chunk, group) and not self._ask(chunk, group):
                return
            self._next = None

    def _all_positions(self) -> Iterator[tuple[range, Incoming]]:
        for group in self._groups:
            for chunk in self._chunks:
                yield group, chunk

    def _wanted(self, chunk: Incoming, group: range) -> bool:
        return not self._visit.given_up and self._prefix.count(group.start) > chunk.index

    def _comes_from_below(self, chunk: Incoming, group: range) -> bool:
        """A chunk that is read whole is asked for once."""
        first = chunk.by_layer or not (group.start or chunk.asked)
        return first and chunk.loaded is None and not chunk.over and bool(chunk.tiers)

    def _ask(self, chunk: Incoming, group: range) -> bool:
        """Begin to read; False if there is no room for it now, or not everything known that it takes."""
        if not chunk.by_layer:
            nbytes = self._stack.layout.nbytes(chunk.shape)
            window = min(_WHOLES, self._stack.memory.pool.capacity // 2 // (nbytes + 2 * envelope.ALIGN_BYTES))
            if len(self._wholes) >= max(1, window):
                return False
            read = self._read_whole(chunk)
            if read is not None:
                self._wholes[chunk.index] = read
            return True
        tier = chunk.tiers[0]
        if len(self._pieces) >= 2 * tier.backend.threads or (group.start and chunk.header is None):
            return False
        place = self._place(chunk, group)
        if place is None:
            return False
        chunk.began = chunk.began or self._runtime.now()
        read_part = partial(_read, tier, chunk, chunk.header, place, group)
        call = tier.begin(read_part)
        if call is None:
            self._let_go(place, chunk)
        else:
            self._pieces[group.start, chunk.index] = _Piece(tier, call, place)
        return True

    def _read_whole(self, chunk: Incoming) -> Read | None:
        chunk.asked = True
        return chunk.tiers[0].read(chunk.segment.key, chunk.shape, chunk.num_tokens, self._visit)

    def _place(self, chunk: Incoming, group: range) -> Place | None:
        dtype = self._stack.layout.dtype
        stays = self._stack.memory.keep or chunk.tiers[0] is not self._stack.stored[0]
        if chunk.place is None and not group.start and stays:
            room = self._stack.rooms.take(self._stack.layout.nbytes(chunk.shape))
            if room is not None:
                chunk.place = Place(room, chunk.shape, dtype)
        if chunk.place is not None:
            return chunk.place
        if not self._spare and self._rooms < 2 * chunk.tiers[0].backend.threads:
            room = self._stack.rooms.passing(self._room_bytes)
            if room is not None:
                self._rooms += 1
                self._spare.append(room)
        if not self._spare:
            return None
        planes, _, tokens, hidden = chunk.shape
        return Place(self._spare.pop(), (planes, len(group), tokens, hidden), dtype, group.start)

    def _lose(self, piece: _Piece, chunk: Incoming) -> None:
        """Give up what may still be under way; it keeps its memory until it returns."""
        piece.call.cancel()
        self._let_go(piece.place, chunk)

    def _let_go(self, place: Place, chunk: Incoming) -> None:
        if place is not chunk.place:
            place.room.release()
            self._rooms -= 1


def _read(
    tier: StoredTier, chunk: Incoming, header: envelope.Header | None, place: Place, layers: range
) -> Arrived | None:
    """On the tier's thread. 0 layers if there is nothing that can be read by layers; None if nobody waits any more."""
    if not place.room.enter():
        return None
    try:
        if header is None:
            header = tier.open_layers(chunk.segment.key, chunk.shape, chunk.num_tokens)
        if header is None:
            return None, 0
        return header, read_layers(tier.backend, header, place, num_layers=chunk.shape[1], layers=layers)
    except CorruptBlobError:
        return None, 0
    finally:
        place.room.release()
