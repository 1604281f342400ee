"""Moves chunks between the engine's KV and the tiers, a run at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import torch

from kvloom.bounded import one_line
from kvloom.contracts.connector import Fence, GPUConnector
from kvloom.contracts.observer import Event
from kvloom.memory import intact
from kvloom.pipeline.load import BEHIND, Pieces, Runs
from kvloom.pipeline.stack import Stack
from kvloom.pipeline.task import Cancellation
from kvloom.runtime import Runtime
from kvloom.telemetry.events import EventBus
from kvloom.telemetry.request_trace import NO_TRACE, RequestTrace
from kvloom.tiers.chain import Chain
from kvloom.tiers.request_context import RequestContext
from kvloom.types import Chunk, ChunkKey, MemoryFormat, Segment, tokens_of

log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 20
"""The most that is copied at once, if it is more than one chunk: who cancels a move waits for what is under way."""
CHANGED = "changed while it was read"
"""Miss reason of a chunk in a store's memory."""
DEVICE_FAILED = "device failed"
"""Reason of what was not moved, because the engine's device had no memory left for it."""

Where = Mapping[str, Any]
T = TypeVar("T")


class Transfer:
    """The work of an engine's loads and saves. Keeps no state between calls.

    keys: the chain that the segments are part of. record: the trace of the request, which ends here.
    """

    def __init__(self, stack: Stack, connector: GPUConnector, events: EventBus, runtime: Runtime) -> None:
        self._stack = stack
        self._connector = connector
        self._events = events
        self._now = runtime.now

    def load(
        self, stop: Cancellation, segments: Sequence[Segment], where: Where | None, *, keys: Sequence[ChunkKey],
        record: RequestTrace, into: GPUConnector | None = None, pieces: Pieces | None = None, at_once: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Move each segment that a tier delivers into the engine's KV, and pieces of the first that none delivers.

        where: None for into memory only. at_once: see `Engine.load`. Returns a bool for each segment: whether it was
        moved.
        """
        connector = into or self._connector
        runs = self._runs(stop, segments, where, keys, record, connector, gaps=True, pieces=pieces)
        moved = frozenset(self._moved(stop, segments, where, runs, connector, record, leading=False, at_once=at_once))
        return torch.tensor([segment in moved for segment in segments], dtype=torch.bool)

    def load_leading(
        self, stop: Cancellation, segments: Sequence[Segment], where: Where, *, keys: Sequence[ChunkKey],
        pieces: Pieces, record: RequestTrace,
    ) -> list[Segment]:  # fmt: skip
        """Move segments into the engine's KV up to the first that no tier delivers, and pieces of that one.

        Returns the moved segments and pieces, in order.
        """
        runs = self._runs(stop, segments, where, keys, record, self._connector, gaps=False, pieces=pieces)
        return self._moved(stop, segments, where, runs, self._connector, record, leading=True)

    def _moved(
        self, stop: Cancellation, segments: Sequence[Segment], where: Where | None, runs: Runs, connector: GPUConnector,
        record: RequestTrace, *, leading: bool, at_once: bool = False,
    ) -> list[Segment]:  # fmt: skip
        """leading: end at the first segment that is lost."""
        moved: list[Segment] = []
        began, nbytes = self._now(), 0
        with record.going_on(), closing(runs):
            if where is not None and leading:  # else it was, when the task began
                check_where(connector, segments, where)
            pieces = (piece for whole in runs for piece in _in_pieces(whole, lambda pair: pair[1].chunk))
            for run in runs if at_once else pieces:
                here = [segment for segment, _ in run]
                if where is not None:
                    chunks = [loaded.chunk for _, loaded in run]
                    try:
                        if not stop.touch(partial(_copy, connector.write, here, chunks, where, record)):
                            break
                    except torch.OutOfMemoryError as error:
                        log.warning("chunks could not be loaded: %s", one_line(error))
                        self._stack.loader.missed(here, DEVICE_FAILED)
                        break
                lost = []
                if any(loaded.lease.store for _, loaded in run):
                    right = intact([loaded.lease for _, loaded in run])
                    lost = [segment for segment, fine in zip(here, right, strict=True) if not fine]
                if lost:
                    end = here.index(lost[0]) if leading else len(here)
                    self._stack.loader.missed(lost, CHANGED)
                    self._stack.loader.missed([one for one in here[end:] if one not in lost], BEHIND)
                    here = [one for one in here[:end] if one not in lost]
                nbytes += sum(loaded.chunk.nbytes for segment, loaded in run if not lost or segment in here)
                moved += here
                if stop.cancelled or (lost and leading):
                    break
            record.served_tokens = num_tokens = tokens_of(moved)
        if moved and where is not None:
            self._events.emit(Event("retrieved", "", num_tokens, len(moved), nbytes, self._now() - began))
        return moved

    def _runs(
        self, stop: Cancellation, segments: Sequence[Segment], where: Where | None, keys: Sequence[ChunkKey],
        record: RequestTrace, connector: GPUConnector, *, gaps: bool, pieces: Pieces | None = None,
    ) -> Runs:  # fmt: skip
        """As `Loader.fetch`. If everything is at hand, nothing else is asked."""
        memory = self._stack.memory
        into_memory = where is None and memory.keep
        held = memory.lease([segment.key for segment in segments])
        try:
            if not (into_memory or all(held)):
                self._stack.loader.add_mapped(held, segments, self._connector.shape)
            if held and all(held):
                run = [(segment, loaded) for segment, loaded in zip(segments, held, strict=True) if loaded is not None]
                if record is not NO_TRACE:
                    for segment, one in run:
                        record.gave(one.lease.store or memory.name, segment.end - segment.start)
                yield run
                return
        finally:
            for loaded in held:
                if loaded is not None:
                    loaded.lease.release()
        # Reads from below need room in memory, so the leases are released first; `fetch` leases a few chunks ahead.
        context = self._context(stop, keys, record)
        context.into_memory = into_memory
        if segments and where is not None and self._stack.passes_through:  # else `where` is not checked
            context.device = connector.device(where)
        yield from self._stack.loader.fetch(segments, self._connector.shape, context, gaps=gaps, pieces=pieces)

    def save(
        self, stop: Cancellation, segments: Sequence[Segment], where: Where, *, keys: Sequence[ChunkKey],
        record: RequestTrace,
    ) -> torch.Tensor:  # fmt: skip
        """From the engine's KV into the tiers that lack it. Returns a bool for each segment: whether it was copied."""

        def copy_piece(piece: Sequence[tuple[Segment, Chunk]]) -> None:
            segments, chunks = [segment for segment, _ in piece], [chunk for _, chunk in piece]
            _copy(self._connector.read, segments, chunks, where, record)

        def copy(some: Sequence[Segment], chunks: Sequence[Chunk]) -> bool:
            pieces = _in_pieces(list(zip(some, chunks, strict=True)), lambda pair: pair[1])
            try:
                return all(stop.touch(partial(copy_piece, piece)) for piece in pieces)
            except torch.OutOfMemoryError as error:
                log.warning("chunks could not be saved: %s", one_line(error))
                dropped = Event("dropped", tokens=tokens_of(some), chunks=len(some), reason=DEVICE_FAILED)
                self._events.emit(dropped)
                return False

        with record.going_on():
            check_where(self._connector, segments, where)
            context = self._context(stop, keys, record)
            context.copied, context.stalled = stop.copied, stop.stalled
            copied = self._stack.storer.keep(segments, self._connector.shape, copy, context)
            record.served_tokens = tokens_of(segments)
        return torch.tensor([segment in copied for segment in segments], dtype=torch.bool)

    def _context(self, stop: Cancellation, keys: Sequence[ChunkKey], record: RequestTrace) -> RequestContext:
        context = self._stack.context(Chain(keys), record)
        stop.on_cancel(context.give_up)
        return context


def _in_pieces(run: Sequence[T], chunk_of: Callable[[T], Chunk]) -> Iterator[Sequence[T]]:
    """Cut where more would be moved than `PIECE_BYTES`."""
    first, nbytes = 0, 0
    for number, each in enumerate(run):
        size = chunk_of(each).nbytes
        if number > first and nbytes + size > PIECE_BYTES:
            yield run[first:number]
            first, nbytes = number, 0
        nbytes += size
    yield run[first:]


def check_connector(connector: GPUConnector, method: str) -> None:
    """Raise NotImplementedError unless the connector has that optional method, and chunks that have layers."""
    if getattr(type(connector), method) is getattr(GPUConnector, method):
        raise NotImplementedError(f"connector {connector.type!r} does not move single layers: it has no {method}")
    if connector.format is not MemoryFormat.KV_BLOB:
        raise NotImplementedError(f"connector {connector.type!r} has {connector.format.name}, which has no layers")


def check_where(connector: GPUConnector, segments: Sequence[Segment], where: Where) -> None:
    """Raises what the connector raises if it cannot move these segments."""
    if segments:
        connector.check(where, max(segment.end for segment in segments))


def _copy(
    move: Callable[..., Fence | None], segments: Sequence[Segment], chunks: Sequence[Chunk], where: Where,
    record: RequestTrace,
) -> None:  # fmt: skip
    """move: the connector's `read` or `write`."""
    began = record.now()
    fence = move(segments, chunks, **where)
    if fence is not None:
        fence.wait()
    if record is not NO_TRACE:
        record.note("copy", "", began, record.now(), nbytes=sum(chunk.nbytes for chunk in chunks), chunks=len(chunks))
