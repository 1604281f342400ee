"""The ordered stack of tiers, fast to slow: where a chunk is, bringing it up, writing it through."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from kvloom.contracts.observer import ChunkEvent, Event
from kvloom.envelope import ALIGN_BYTES
from kvloom.errors import BackendError
from kvloom.events import EventBus
from kvloom.memory import Reservation
from kvloom.records import NO_RECORD, Record
from kvloom.runtime import Runtime
from kvloom.tiers.arrivals import WholeRead
from kvloom.tiers.base import Layout, Loaded, Tier
from kvloom.tiers.chain import NO_CHAIN, Chain
from kvloom.tiers.claims import Claims, Holder, LongClaims
from kvloom.tiers.flights import Read
from kvloom.tiers.memory import MemoryTier
from kvloom.tiers.rooms import Room, Rooms
from kvloom.tiers.stored import StoredTier
from kvloom.tiers.visit import Visit
from kvloom.types import EXACT, Chunk, ChunkKey, Health, Segment

Shape = Callable[[int], Sequence[int]]
"""Tokens to the shape of their chunk."""
Runs = Generator[list[tuple[Segment, Loaded]], None, None]
Copy = Callable[[Sequence[Segment], Sequence[Chunk]], bool]
"""Fill chunks from the engine; False if that may no longer be done."""


@dataclass(slots=True)
class _Arrival:
    """A segment on its way to the engine."""

    segment: Segment
    tiers: list[StoredTier]
    """Stored tiers where it may be, fastest first; those tried already are gone."""
    loaded: Loaded | None = None
    read: Read | WholeRead | None = None
    source: StoredTier | None = None
    """The tier that it is being read from."""

    @property
    def done(self) -> bool:
        """There is nothing to wait for."""
        return self.loaded is not None or self.read is None or self.read.done

    def give_up(self) -> None:
        if self.loaded is not None:
            self.loaded.release()
        if self.read is not None:
            assert self.source is not None
            self.source.loads.give_up(self.read)


class Stack:
    """All tiers of an engine. `memory` is always there; without a memory tier in the config it keeps nothing."""

    def __init__(
        self, memory: MemoryTier, stored: Sequence[StoredTier], layout: Layout, events: EventBus, runtime: Runtime
    ) -> None:
        self.memory = memory
        self.stored = tuple(stored)
        kept: list[Tier] = [memory] if memory.keep else []
        self.tiers = {tier.name: tier for tier in [*kept, *stored]}
        """The tiers of the config by name, in its order."""
        self.layout = layout
        self.rooms = Rooms(memory, runtime)
        self._events = events
        self._runtime = runtime
        self._through = tuple(tier for tier in stored if tier.policy.write == "through")
        self._behind = tuple(tier for tier in stored if tier.policy.write == "on_evict")
        self._claims = Claims(runtime)
        self._by_layer = LongClaims(runtime, self.deadline)
        if self._behind:
            memory.write_back = self._write_back

    def visit(self, chain: Chain = NO_CHAIN, record: Record = NO_RECORD) -> Visit:
        """An operation that begins now. chain: what it is about. record: where it is noted."""
        return Visit(self._runtime, self.deadline, since=self.memory.purges.mark(), chain=chain, record=record)

    @property
    def deadline(self) -> float:
        """The longest that one step of any tier may take, in seconds."""
        return max((tier.deadline for tier in self.stored), default=self.memory.deadline)

    # -- finding -------------------------------------------------------------------------------------------------------

    def locate(self, keys: Sequence[ChunkKey], names: Sequence[str] | None = None) -> list[str | None]:
        """The fastest of the tiers `names` (default: all) that says it holds each key."""
        visit = self.visit()
        where: list[str | None] = [None] * len(keys)
        left = list(range(len(keys)))
        for name, tier in self.tiers.items():
            if not left:
                break
            if names is None or name in names:
                found = tier.find(keys if len(left) == len(keys) else [keys[index] for index in left], visit)
                if len(left) == len(keys) and all(found):
                    return [name] * len(keys)
                for index, here in zip(left, found, strict=True):
                    if here:
                        where[index] = name
                left = [index for index, here in zip(left, found, strict=True) if not here]
        return where

    def touch(self, chain: Sequence[ChunkKey], *, count: bool = True) -> None:
        """Note that a whole chain was used, in every tier. count: once more than before."""
        self.memory.touch(chain)
        for tier in self.stored:
            tier.touch(chain, count=count)

    # -- towards the engine --------------------------------------------------------------------------------------------

    def fetch(self, segments: Sequence[Segment], shape: Shape, visit: Visit, *, gaps: bool) -> Runs:
        """Runs of verified chunks in order, as soon as they are there; leased until the next is asked for.

        gaps: go on behind a segment that is nowhere to be had; otherwise stop at the first. Chunks that came from
        stored tiers are in memory afterwards, if there is a memory tier.
        """
        keys = [segment.key for segment in segments]
        held = self.memory.lease(keys)
        run = [(segment, loaded) for segment, loaded in zip(segments, held, strict=True) if loaded is not None]
        try:
            if run and len(run) == len(segments):
                self._from_memory(segments, visit)
                yield run
                return
        finally:
            for _, loaded in run:
                loaded.release()
        # What comes from below needs room: nothing was held but for a moment, and little is held ahead.
        yield from self._stream(deque(self._arrivals(segments, visit)), shape, visit, gaps=gaps)

    def _arrivals(self, segments: Sequence[Segment], visit: Visit) -> list[_Arrival]:
        keys = [segment.key for segment in segments]
        absent = [key for key, here in zip(keys, self.memory.find(keys), strict=True) if not here]
        holders: dict[ChunkKey, list[StoredTier]] = {key: [] for key in absent}
        for tier in self.stored:
            for key, here in zip(absent, tier.find(absent, visit), strict=True):
                if here:
                    holders[key].append(tier)
        return [_Arrival(segment, holders.get(segment.key, list(self.stored))) for segment in segments]

    def _stream(self, waiting: deque[_Arrival], shape: Shape, visit: Visit, *, gaps: bool) -> Runs:
        if not waiting:
            return
        window = self._window(waiting[0], shape)
        started: deque[_Arrival] = deque()
        run: list[tuple[Segment, Loaded]] = []
        try:
            while waiting or started:
                while waiting and len(started) < window:
                    started.append(waiting.popleft())
                    self._start(started[-1], shape, visit)
                arrival = started[0]
                if run and (len(run) >= window or not arrival.done):
                    yield run  # what is here need not wait for what is not, and nothing waits holding a lease
                    for _, loaded in run:
                        loaded.release()
                    run = []
                arrived = self._finish(arrival, shape, visit)
                started.popleft()
                if arrived is not None:
                    run.append((arrival.segment, arrived))
                elif not gaps or visit.given_up:
                    break
            if run:
                yield run
        finally:
            for _, loaded in run:
                loaded.release()
            for arrival in started:
                arrival.give_up()

    def _window(self, arrival: _Arrival, shape: Shape) -> int:
        """How many chunks may be on their way at once: their buffers must fit beside each other."""
        segment = arrival.segment
        nbytes = self._nbytes(segment, shape) + 2 * ALIGN_BYTES  # a framed blob: a header, and whole pages
        return max(1, min(8, self.memory.pool.capacity // 2 // nbytes))

    def _start(self, arrival: _Arrival, shape: Shape, visit: Visit) -> None:
        """Lease the chunk from memory, or begin to read it from the next tier that may have it."""
        segment = arrival.segment
        arrival.loaded = self.memory.lease([segment.key])[0]
        while arrival.loaded is None and arrival.read is None and arrival.tiers:
            num_tokens = segment.end - segment.start
            arrival.source = arrival.tiers.pop(0)
            found = arrival.source.loads.fetch(segment.key, shape(num_tokens), num_tokens, visit)
            if isinstance(found, Loaded):
                arrival.loaded = found
            else:
                arrival.read = found

    def _finish(self, arrival: _Arrival, shape: Shape, visit: Visit) -> Loaded | None:
        """Wait for a chunk; where it turns out not to be, ask the next tier."""
        while arrival.loaded is None and arrival.read is not None:
            source, read, arrival.read = arrival.source, arrival.read, None
            assert source is not None
            loaded = source.loads.collect(read)
            if loaded is not None:
                visit.progress()
                visit.record.gave(source.name, arrival.segment.end - arrival.segment.start)
                self.promote(arrival.segment, loaded, visit, below=source)
                return loaded
            self._start(arrival, shape, visit)
        if arrival.loaded is None:
            num_tokens = arrival.segment.end - arrival.segment.start
            self._events.emit(Event("missed", tokens=num_tokens, chunks=1, reason="in no tier"))
        else:
            self._from_memory([arrival.segment], visit)
        return arrival.loaded

    def _from_memory(self, segments: Sequence[Segment], visit: Visit) -> None:
        if visit.record is not NO_RECORD:
            visit.record.gave(self.memory.name, sum(segment.end - segment.start for segment in segments))

    def promote(self, segment: Segment, loaded: Loaded, visit: Visit, *, below: StoredTier) -> None:
        """Write a chunk that came from a slow tier to the faster stored ones. A lossy one stays in memory only."""
        if self.memory.keep:
            self._events.emit(Event("promoted", self.memory.name, loaded.chunk.num_tokens, 1, loaded.chunk.nbytes))
        if not loaded.chunk.exact:
            return
        for tier in self.stored[: self.stored.index(below)]:
            if tier.policy.write == "through" and tier.lacks(segment.key, loaded.written):
                tier.submit(
                    segment.key, loaded.again(), until=self._runtime.now(), since=visit.since, chain=visit.chain,
                    record=visit.record,
                )  # fmt: skip

    # -- from the engine -----------------------------------------------------------------------------------------------

    def keep(self, segments: Sequence[Segment], shape: Shape, copy: Copy, visit: Visit) -> None:
        """Keep the exact KV of `segments` in every tier that lacks it; `copy` reads it from the engine.

        Only what no tier can give is copied, and what somebody else is copying at the time is not copied twice.
        Returns when nothing more is read from the engine.
        """
        left = list(segments)
        while left and not visit.given_up:
            keys = [segment.key for segment in left]
            with self._claims.of(keys) as mine:
                self._keep([segment for segment in left if segment.key in mine], shape, copy, visit)
            left = [segment for segment in left if segment.key not in mine]
            if left and not self._claims.wait([segment.key for segment in left], visit.until):
                return

    def _keep(self, segments: Sequence[Segment], shape: Shape, copy: Copy, visit: Visit) -> None:
        todo = self.missing(segments, visit)
        if todo:
            self._copy_in(todo, shape, copy, visit)

    def missing(self, segments: Sequence[Segment], visit: Visit) -> list[tuple[Segment, list[StoredTier]]]:
        """Those segments whose KV must be read from the engine, each with the stored tiers to write it to.

        What memory holds and a stored tier lacks is written to it at once.
        """
        keys = [segment.key for segment in segments]
        in_memory = self.memory.find(keys, exact=True)
        lacking: list[list[StoredTier]] = [[] for _ in keys]
        for tier in self._through:
            for place, fine in zip(lacking, tier.satisfied(keys, visit), strict=True):
                if not fine:
                    place.append(tier)
        todo = []
        for segment, here, tiers in zip(segments, in_memory, lacking, strict=True):
            if not here and (self.memory.keep or tiers):
                todo.append((segment, tiers))
            elif tiers:
                self._write_from_memory(segment.key, tiers, visit)
        return todo

    # -- from the engine, layer by layer -------------------------------------------------------------------------------

    def claim(self, segments: Sequence[Segment]) -> Holder:
        """Claim those segments that nobody is storing just now: for as long as `LongClaims` says, until `settle`.

        `keep` does not wait for these claims, nor does it heed them: who stores a whole chunk has all of it now.
        """
        keys = [segment.key for segment in segments]
        busy = self._claims.taken(keys)
        return self._by_layer.take([key for key in keys if key not in busy])

    def go_on(self, holder: Holder) -> None:
        """Whoever holds these claims has done something for them."""
        self._by_layer.go_on(holder)

    def settle(self, holder: Holder, segments: Sequence[Segment] = (), *, stored: bool) -> None:
        """Give up claims, by default all. What others left to the holder, and was not stored, is counted as dropped."""
        left = self._by_layer.give(holder, [segment.key for segment in segments] or None)
        if left and not stored:
            self._events.emit(Event("dropped", chunks=len(left), reason="left to another, who did not store it"))

    def still_lacking(self, key: ChunkKey, tiers: Sequence[StoredTier]) -> list[StoredTier] | None:
        """Those of `tiers` that nobody has given the exact chunk to meanwhile; None if it need not be kept at all.

        As far as is known here and now.
        """
        if self.memory.find([key], exact=True)[0]:
            return None  # whoever put it there saw to the tiers
        lacking = [tier for tier in tiers if not tier.has_enough(key)]
        return lacking if lacking or self.memory.keep else None

    # -- from the engine, in whole chunks ------------------------------------------------------------------------------

    def _write_from_memory(self, key: ChunkKey, tiers: Sequence[StoredTier], visit: Visit) -> None:
        loaded = self.memory.lease([key])[0]
        if loaded is not None:  # else evicted a moment ago: it will be stored when it is computed again
            for tier in tiers if loaded.chunk.exact else ():  # it may have been another a moment ago
                if not tier.outlived(loaded.written):
                    tier.submit(
                        key, loaded.again(), until=visit.until, since=visit.since, chain=visit.chain,
                        record=visit.record,
                    )  # fmt: skip
            loaded.release()

    def _copy_in(self, todo: list[tuple[Segment, list[StoredTier]]], shape: Shape, copy: Copy, visit: Visit) -> None:
        if not any(tiers for _, tiers in todo):
            # Memory is all there is: a tail that would push out its own head is not worth copying.
            room, fits = self.memory.pool.capacity, 0
            while (
                fits < len(todo) and (room := room - self.memory.pool.taken_by(self._nbytes(todo[fits][0], shape))) >= 0
            ):
                fits += 1
            todo = todo[:fits]
        while todo:
            batch = self._reserve(todo, shape, visit.until)
            if not batch:
                num_tokens = sum(segment.end - segment.start for segment, _ in todo)
                self._events.emit(Event("dropped", tokens=num_tokens, chunks=len(todo), reason="no room in memory"))
                return
            chunks = [
                Chunk(
                    room.tensor(shape(segment.end - segment.start), self.layout.dtype),
                    self.layout.format,
                    segment.end - segment.start,
                    EXACT,
                    segment.start,
                )
                for (segment, _), room in zip(todo, batch, strict=False)
            ]
            now, todo = todo[: len(batch)], todo[len(batch) :]
            began = self._runtime.now()
            copied = False
            try:
                copied = copy([segment for segment, _ in now], chunks)
            finally:
                if not copied:
                    for reservation in batch:
                        reservation.abandon()
            if not copied:
                return
            visit.progress()
            self.insert(now, chunks, batch, visit, seconds=self._runtime.now() - began)

    def insert(
        self, now: Sequence[tuple[Segment, list[StoredTier]]], chunks: Sequence[Chunk],
        rooms: Sequence[Reservation | Room], visit: Visit, *, seconds: float,
    ) -> None:  # fmt: skip
        """Take chunks that were filled into memory, and write them to the stored tiers that lack them."""
        written = self._runtime.wall()
        for (segment, tiers), chunk, room in zip(now, chunks, rooms, strict=True):
            block = room.seal()
            assert block is not None, "these reservations have no deadline"
            loaded = self.memory.insert(
                segment.key, chunk, block, written=written, since=visit.since, chain=visit.chain
            )
            for tier in tiers:
                tier.submit(
                    segment.key, loaded.again(), until=visit.until, since=visit.since, chain=visit.chain,
                    record=visit.record,
                )  # fmt: skip
            loaded.release()
        self.memory.touch([segment.key for segment, _ in now])
        if self.memory.keep:
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            nbytes = sum(chunk.nbytes for chunk in chunks)
            self._events.emit(Event("stored", self.memory.name, num_tokens, len(chunks), nbytes, seconds))

    def _reserve(
        self, todo: Sequence[tuple[Segment, list[StoredTier]]], shape: Shape, until: float
    ) -> list[Reservation]:
        """Memory for as many leading segments as there is room for now; for one, waiting if need be."""
        rooms: list[Reservation] = []
        for segment, _ in todo:
            nbytes = self._nbytes(segment, shape)
            room = self.memory.reserve(nbytes)
            if room is None and not rooms:
                room = self.memory.reserve_by(nbytes, until)
            if room is None:
                break
            rooms.append(room)
        return rooms

    def _nbytes(self, segment: Segment, shape: Shape) -> int:
        return self.layout.nbytes(shape(segment.end - segment.start))

    # -- writing when memory lets go -----------------------------------------------------------------------------------

    def _write_back(self, key: ChunkKey, loaded: Loaded) -> bool | None:
        """Write a chunk that memory is about to let go to the tiers that wait for it; see `MemoryTier.write_back`.

        Who removes the chunk waits until this has returned, so that the mark is from before, or the removal under way.
        """
        since = self.memory.purges.mark()
        lacking = [tier for tier in self._behind if tier.lacks(key, loaded.written)]
        if not all(tier.has_room(loaded.chunk.nbytes) for tier in lacking):
            return None
        for tier in lacking:
            tier.submit(key, loaded.again(), until=self._runtime.now(), since=since, chain=loaded.chain.again())
        if lacking:
            loaded.release()
        return bool(lacking)

    # -- all tiers -----------------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        """Delete chunks everywhere. Every tier is asked; then raises the BackendError of the first that failed."""
        with self.memory.purges.removing(keys):
            self.memory.remove(keys)
            _each(self.stored, lambda tier: tier.remove(keys))

    def clear(self, prefix: str) -> None:
        """Delete every chunk whose key starts with `prefix` everywhere; as `remove` does.

        prefix: a beginning of `<fingerprint>/<salt tag>/`, up to and with a slash.
        """

        with self.memory.purges.clearing(prefix):
            self.memory.remove([key for key in self.memory.chunks() if f"{key.namespace}/".startswith(prefix)])
            try:
                _each(self.stored, lambda tier: tier.clear(prefix))
            finally:
                self._events.emit_chunks(ChunkEvent("cleared", prefix=prefix))

    def flush(self, until: float) -> bool:
        """Wait until every accepted write is in its tier; False if `until` came first."""
        done = [tier.flush(until) for tier in self.stored]
        return all(done)

    def health(self) -> Health:
        """How the tiers of the config are."""
        return Health(tuple(tier.health() for tier in self.tiers.values()))

    def close(self) -> None:
        """Write what is to be written, within the deadlines, and give everything back."""
        if self._behind:
            self.memory.write_back_all(self._runtime.now() + self.deadline)
        for tier in self.stored:
            tier.close()
        self.memory.close()


def _each(tiers: Sequence[StoredTier], do: Callable[[StoredTier], None]) -> None:
    errors = []
    for tier in tiers:
        try:
            do(tier)
        except BackendError as error:
            errors.append(error)
    if errors:
        raise errors[0]
