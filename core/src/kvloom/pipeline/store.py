"""Storing: copies chunks that some tier lacks out of the engine once, into memory, and writes them to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from kvloom.contracts.observer import Event
from kvloom.memory import Reservation
from kvloom.pipeline.key_locks import Holder, KeyLocks, LongKeyLocks
from kvloom.runtime import Runtime
from kvloom.telemetry.events import EventBus
from kvloom.tiers.memory.tier import MemoryTier
from kvloom.tiers.request_context import HURRIED_SHARE, RequestContext
from kvloom.tiers.stored.existence import Inquiry
from kvloom.tiers.stored.tier import StoredTier
from kvloom.tiers.tier import Layout, Loaded, Shape
from kvloom.types import EXACT, Chunk, ChunkKey, Segment

ANSWER_SECONDS = 0.02
"""Longest wait of a store for the tiers' answers, in seconds. Later answers are checked before each write."""


class Lacking(NamedTuple):
    """A tier that a chunk is to be written to."""

    tier: StoredTier
    inquiry: Inquiry | None = None
    """The open question whether the tier has the chunk already; None if it is known to lack it."""


Todo = list[tuple[Segment, list[Lacking]]]
"""Segments to be kept, each with the stored tiers to write it to."""
Copy = Callable[[Sequence[Segment], Sequence[Chunk]], bool]
"""Fill chunks from the engine; False if that may no longer be done."""


class Storer:
    """Stores chunks for the engine."""

    def __init__(
        self, memory: MemoryTier, stored: Sequence[StoredTier], layout: Layout, events: EventBus, runtime: Runtime, *,
        deadline: float,
    ) -> None:  # fmt: skip
        """stored: fastest first. deadline: the longest that one step of any tier may take, in seconds."""
        self.memory = memory
        self.layout = layout
        self._events = events
        self._runtime = runtime
        self._through = tuple(tier for tier in stored if tier.policy.write == "through")
        self._behind = tuple(tier for tier in stored if tier.policy.write == "on_evict")
        self._locks = KeyLocks(runtime)
        self._by_layer = LongKeyLocks(runtime, deadline)
        if self._behind:
            memory.write_back.write = self._write_back

    def keep(self, segments: Sequence[Segment], shape: Shape, copy: Copy, context: RequestContext) -> set[Segment]:
        """Keep the exact KV of `segments` in every tier that lacks it; `copy` reads it from the engine.

        Only what no tier can give is copied, and what somebody else is copying at the time is not copied twice.
        Returns the segments that were copied, when nothing more is read from the engine.
        """
        copied: set[Segment] = set()
        left = list(segments)
        while left and not context.given_up:
            keys = [segment.key for segment in left]
            with self._locks.of(keys) as mine:
                todo = self.missing([segment for segment in left if segment.key in mine], context)
                copied.update(self._copy_in(todo, shape, copy, context))
            left = [segment for segment in left if segment.key not in mine]
            if left and not self._locks.wait([segment.key for segment in left], context.until):
                break
        return copied

    def missing(self, segments: Sequence[Segment], context: RequestContext) -> Todo:
        """Those segments whose KV must be read from the engine, each with the stored tiers to write it to.

        What memory holds and a stored tier lacks is written to it at once.
        """
        keys = [segment.key for segment in segments]
        in_memory = self.memory.find(keys, exact=True)
        todo = []
        for segment, here, tiers in zip(segments, in_memory, self._lacking(keys, context), strict=True):
            if not here and (self.memory.keep or tiers):
                todo.append((segment, tiers))
            elif tiers:
                self._write_from_memory(segment.key, tiers, context)
        return todo

    def _lacking(self, keys: Sequence[ChunkKey], context: RequestContext) -> list[list[Lacking]]:
        """For each key, the tiers to write it to. A tier that does not answer delays only the writes to itself."""
        asked = [(tier, inquiry) for tier in self._through if (inquiry := tier.inquire(keys, context)) is not None]
        soon = self._runtime.now() + ANSWER_SECONDS
        for _, inquiry in asked:
            inquiry.wait(soon)
        lacking = self._said(keys, asked)
        if not self.memory.keep and any(tiers and all(one.inquiry for one in tiers) for tiers in lacking):
            # It depends on the answers whether there is anything to be copied.
            for tier, inquiry in asked:
                inquiry.wait(context.patience(HURRIED_SHARE * tier.deadline))
            lacking = self._said(keys, asked)
        return [[] for _ in keys] if context.given_up else lacking

    def _said(self, keys: Sequence[ChunkKey], asked: Sequence[tuple[StoredTier, Inquiry]]) -> list[list[Lacking]]:
        lacking: list[list[Lacking]] = [[] for _ in keys]
        for tier, inquiry in asked:
            for key, place, fine in zip(keys, lacking, tier.satisfied(keys, inquiry), strict=True):
                if not fine:
                    place.append(Lacking(tier, inquiry if inquiry.concerns(key) else None))
        return lacking

    # -- from the engine, layer by layer -------------------------------------------------------------------------------

    def claim(self, segments: Sequence[Segment]) -> Holder:
        """Claim those segments that nobody is storing just now: for as long as `LongKeyLocks` says, until `settle`.

        `keep` ignores these claims and does not wait, because it has the whole chunk already.
        """
        keys = [segment.key for segment in segments]
        busy = self._locks.taken(keys)
        return self._by_layer.take([key for key in keys if key not in busy])

    def go_on(self, holder: Holder) -> None:
        """Note that a holder has made progress."""
        self._by_layer.go_on(holder)

    def settle(self, holder: Holder, segments: Sequence[Segment] = (), *, stored: bool) -> None:
        """Give up keys, by default all. Chunks that others left out and that were not stored count as dropped."""
        left = self._by_layer.give(holder, [segment.key for segment in segments] or None)
        if left and not stored:
            self._events.emit(Event("dropped", chunks=len(left), reason="left to another, who did not store it"))

    def still_lacking(self, key: ChunkKey, tiers: Sequence[Lacking]) -> list[Lacking] | None:
        """Those of `tiers` that still lack the exact chunk, as far as is known; None if it need not be stored."""
        if self.memory.find([key], exact=True)[0]:
            return None  # whoever put it there saw to the tiers
        unsaid = [one for one in tiers if one.inquiry is not None and one.inquiry.concerns(key)]
        lacking = unsaid + [one for one in tiers if one not in unsaid and not one.tier.has_enough(key)]
        return lacking if lacking or self.memory.keep else None

    # -- from the engine, in whole chunks ------------------------------------------------------------------------------

    def _write_from_memory(self, key: ChunkKey, tiers: Sequence[Lacking], context: RequestContext) -> None:
        loaded = self.memory.lease([key])[0]
        if loaded is not None:  # else evicted a moment ago: it will be stored when it is computed again
            for tier, inquiry in tiers if loaded.chunk.exact else ():  # it may have been another a moment ago
                if not tier.outlived(loaded.written):
                    self._submit(key, loaded, tier, inquiry, context, left=True)
            loaded.release()

    def _submit(
        self, key: ChunkKey, loaded: Loaded, tier: StoredTier, inquiry: Inquiry | None, context: RequestContext, *,
        left: bool,
    ) -> None:  # fmt: skip
        """Queue a write. left: there is still something to be copied out of the engine."""
        with nullcontext() if not left or tier.has_room(loaded.chunk.nbytes) else context.waiting_for_room():
            tier.submit(
                key, loaded.again(), until=context.until, since=context.since, chain=context.chain,
                record=context.record, inquiry=inquiry,
            )  # fmt: skip

    def _copy_in(self, todo: Todo, shape: Shape, copy: Copy, context: RequestContext) -> list[Segment]:
        """Copy as many leading segments as there is room for; returns them."""
        done: list[Segment] = []
        if not any(tiers for _, tiers in todo):
            # Memory is all there is: a tail that would push out its own head is not worth copying.
            left, fits = self.memory.pool.capacity, 0
            while (
                fits < len(todo) and (left := left - self.memory.pool.taken_by(self._nbytes(todo[fits][0], shape))) >= 0
            ):
                fits += 1
            todo = todo[:fits]
        while todo:
            batch = self._reserve(todo, shape, context)
            if not batch:
                num_tokens = sum(segment.end - segment.start for segment, _ in todo)
                self._events.emit(Event("dropped", tokens=num_tokens, chunks=len(todo), reason="no room in memory"))
                break
            chunks = [
                Chunk(
                    reservation.tensor(shape(segment.end - segment.start), self.layout.dtype),
                    self.layout.format,
                    segment.end - segment.start,
                    EXACT,
                    segment.start,
                )
                for (segment, _), reservation in zip(todo, batch, strict=False)
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
                break
            context.progress()
            if not todo:
                context.copied()  # the tiers' queues may be full
            self.insert(now, chunks, batch, context, seconds=self._runtime.now() - began, left=bool(todo))
            done += [segment for segment, _ in now]
        return done

    def insert(
        self, now: Sequence[tuple[Segment, list[Lacking]]], chunks: Sequence[Chunk],
        reservations: Sequence[Reservation], context: RequestContext, *, seconds: float, left: bool = False,
    ) -> None:  # fmt: skip
        """Take chunks that were filled into memory, and write them to the stored tiers that lack them.

        left: there are more to be copied out of the engine.
        """
        written = self._runtime.wall()
        for (segment, tiers), chunk, reservation in zip(now, chunks, reservations, strict=True):
            block = reservation.seal()
            assert block is not None, "these reservations have no deadline"
            loaded = self.memory.insert(
                segment.key, chunk, block, written=written, since=context.since, chain=context.chain
            )
            for tier, inquiry in tiers:
                self._submit(segment.key, loaded, tier, inquiry, context, left=left)
            loaded.release()
        self.memory.touch([segment.key for segment, _ in now])
        if self.memory.keep:
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            nbytes = sum(chunk.nbytes for chunk in chunks)
            self._events.emit(Event("stored", self.memory.name, num_tokens, len(chunks), nbytes, seconds))

    def _reserve(self, todo: Todo, shape: Shape, context: RequestContext) -> list[Reservation]:
        """Memory for as many leading segments as there is room for now; for one, waiting if need be."""
        reservations: list[Reservation] = []
        for segment, _ in todo:
            nbytes = self._nbytes(segment, shape)
            reservation = self.memory.reserve(nbytes)
            if reservation is None and not reservations:
                with context.waiting_for_room():
                    reservation = self.memory.reserve_by(nbytes, context.until, stopped=lambda: context.given_up)
            if reservation is None:
                break
            reservations.append(reservation)
        return reservations

    def _nbytes(self, segment: Segment, shape: Shape) -> int:
        return self.layout.nbytes(shape(segment.end - segment.start))

    # -- writing when memory evicts -----------------------------------------------------------------------------------

    def _write_back(self, key: ChunkKey, loaded: Loaded) -> bool | None:
        """Write a chunk that memory is about to evict to the tiers with `write: on_evict`; see `WriteBack.write`.

        A removal waits until this has returned, so the mark is from before it, or the removal is still under way.
        """
        since = self.memory.invalidations.mark()
        lacking = [tier for tier in self._behind if tier.lacks(key, loaded.written)]
        if not all(tier.has_room(loaded.chunk.nbytes) for tier in lacking):
            return None
        for tier in lacking:
            tier.submit(key, loaded.again(), until=self._runtime.now(), since=since, chain=loaded.chain.again())
        if lacking:
            loaded.release()
        return bool(lacking)
