"""Storing: KV on its way out of the engine's KV."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from kvloom.contracts.connector import GPUConnector
from kvloom.contracts.observer import Event
from kvloom.errors import BackendError
from kvloom.interrupts import shielded
from kvloom.memory import Reservation
from kvloom.pipeline.layer_read import layer_of
from kvloom.pipeline.stack import Stack
from kvloom.pipeline.store import Todo
from kvloom.runtime import Runtime
from kvloom.telemetry.events import EventBus
from kvloom.telemetry.request_trace import NO_TRACE, RequestTrace
from kvloom.tiers.chain import Chain
from kvloom.types import EXACT, Chunk, Segment, tokens_of


class Storing:
    """KV on its way out of the engine's KV, layer by layer. From `Engine.store_layer`.

    Call `layer` once the KV of that layer is computed, for every layer and in any order, then `finish`. Leaving the
    context without `finish` gives the memory back and stores nothing.

    A chunk that somebody else is storing when this begins is left to them: nobody waits for another's forward pass.
    If they give it up, it is in no tier, and counted as dropped. Somebody who has stored no layer for as long as the
    slowest tier's deadline is taken to have been forgotten. `Engine.store` and `save` do not leave anything to a
    storing by layers: they have the whole chunk at hand. Whichever is second then finds it there, and keeps no copy.
    """

    def __init__(
        self, segments: Sequence[Segment], num_tokens: int, where: Mapping[str, Any], *, chain: Chain,
        stack: Stack, connector: GPUConnector, events: EventBus, runtime: Runtime, finished: Callable[[], None],
        on_end: Callable[[Storing], None], record: RequestTrace = NO_TRACE,
    ) -> None:  # fmt: skip
        """Use `Engine.store_layer`."""
        self._where = where
        self._num_tokens = tokens_of(segments)
        self._stack = stack
        self._connector = connector
        self._runtime = runtime
        self._finished = finished
        self._on_end = on_end
        self._reading = runtime.lock()
        self._began = runtime.now()
        self._done: set[int] = set()
        self._open = True
        self.num_layers = int(connector.shape(1)[1])
        self._context = stack.context(chain, record)
        self._holder = stack.storer.claim(segments)
        self._reservations: list[Reservation] = []
        try:
            self._todo = self._plan([segment for segment in segments if segment.key in self._holder.keys], events)
        except BaseException as error:
            self._let_go(error)
            raise
        self._segments = [segment for segment, _ in self._todo]
        self._chunks = [
            self._chunk(segment, reservation)
            for segment, reservation in zip(self._segments, self._reservations, strict=True)
        ]
        self.mask = torch.zeros(num_tokens, dtype=torch.bool)
        """Over the tokens: whose KV is copied. The others are stored, or being stored, or there is no room for them."""
        for segment in self._segments:
            self.mask[segment.start : segment.end] = True

    def _plan(self, segments: Sequence[Segment], events: EventBus) -> Todo:
        """Return the missing segments that have room, each with the stored tiers to write it to; unlock other keys."""
        stack, context = self._stack, self._context
        todo = stack.storer.missing(segments, context)
        for segment, _ in todo:
            nbytes = stack.layout.nbytes(self._connector.shape(segment.end - segment.start))
            reservation = stack.memory.stage(nbytes, until=None if self._reservations else context.until)
            if reservation is None:
                break
            self._reservations.append(reservation)
        dropped = todo[len(self._reservations) :]
        if dropped:
            tokens = sum(segment.end - segment.start for segment, _ in dropped)
            events.emit(Event("dropped", tokens=tokens, chunks=len(dropped), reason="no room in memory"))
        todo = todo[: len(self._reservations)]
        mine = {segment.key for segment, _ in todo}
        there = [segment for segment in segments if segment.key not in mine]
        if there:
            stack.storer.settle(self._holder, there, stored=True)
        return todo

    def _chunk(self, segment: Segment, reservation: Reservation) -> Chunk:
        num_tokens = segment.end - segment.start
        tensor = reservation.tensor(self._connector.shape(num_tokens), self._stack.layout.dtype)
        return Chunk(tensor, self._stack.layout.format, num_tokens, EXACT, segment.start)

    def layer(self, layer: int, **where: Any) -> None:
        """Copy the KV of one layer; returns when the caller's KV of this layer may be overwritten.

        where: in addition to that of `store_layer`, or instead of it. Raises ValueError as the connector does,
        BackendError if this is closed.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer: {layer} of {self.num_layers}")
        self._layer(layer, where)

    @shielded
    def _layer(self, layer: int, where: Mapping[str, Any]) -> None:
        with self._reading:
            if not self._open:
                raise BackendError("the storing is closed")
            if self._segments:
                began = self._context.record.now()
                chunks = [layer_of(chunk, layer) for chunk in self._chunks]
                fence = self._connector.read_layer(layer, self._segments, chunks, **{**self._where, **where})
                if fence is not None:
                    fence.wait()
                nbytes = sum(chunk.nbytes for chunk in chunks)
                record = self._context.record
                record.note("copy", "", began, record.now(), nbytes=nbytes, chunks=len(chunks))
            self._done.add(layer)
            self._stack.storer.go_on(self._holder)

    @shielded
    def finish(self) -> int:
        """Keep what was copied: in memory now, in the tiers below in the background, as `Engine.store` does.

        Returns how many tokens were new. Raises ValueError, nothing being stored, if a layer is lacking; BackendError
        if this is closed.
        """
        with self._reading:
            if not self._open:
                raise BackendError("the storing is closed")
            absent = sorted(set(range(self.num_layers)) - self._done)
            if not absent:
                self._open = False
        if absent:
            self.close()
            raise ValueError(f"layer: {absent[0]} was never stored ({len(absent)} of {self.num_layers} are lacking)")
        try:
            with self._context.record.going_on() as record:
                num_tokens = self._keep() if self._todo else 0
                record.served_tokens = self._num_tokens
            self._finished()
        finally:
            self._stack.storer.settle(self._holder, stored=True)
            self._on_end(self)
        return num_tokens

    @shielded
    def close(self) -> None:
        """Give the memory back; without `finish` before, nothing is stored. Twice is fine."""
        with self._reading:
            was_open, self._open = self._open, False
        if was_open:
            self._let_go()
            self._on_end(self)

    def _keep(self) -> int:
        self._context.progress()  # the time since it began was the caller's
        kept = []
        for (segment, tiers), chunk, reservation in zip(self._todo, self._chunks, self._reservations, strict=True):
            lacking = self._stack.storer.still_lacking(segment.key, tiers)
            if lacking is None:
                reservation.abandon()
            else:
                kept.append(((segment, lacking), chunk, reservation))
        if kept:
            todo, chunks, reservations = zip(*kept, strict=True)
            seconds = self._runtime.now() - self._began
            self._stack.storer.insert(todo, chunks, reservations, self._context, seconds=seconds)
        return sum(segment.end - segment.start for (segment, _), _, _ in kept)

    def _let_go(self, error: BaseException | None = None) -> None:
        for reservation in self._reservations:
            reservation.abandon()
        self._stack.storer.settle(self._holder, stored=False)
        self._context.record.end(error)

    def after_fork_in_child(self, error: BaseException) -> None:
        """End it in a forked child, whose memory does not have it."""
        self._reading = self._runtime.lock()
        self._open = False

    def __enter__(self) -> Storing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
