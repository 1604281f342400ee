"""Moving: what a task does, run by run, between the engine's KV and the tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch

from kvloom.contracts.connector import GPUConnector
from kvloom.contracts.observer import Event
from kvloom.pipeline.stack import Stack
from kvloom.pipeline.task import Task
from kvloom.runtime import Runtime
from kvloom.telemetry.events import EventBus
from kvloom.telemetry.request_trace import RequestTrace
from kvloom.tiers.chain import Chain
from kvloom.tiers.request_context import RequestContext
from kvloom.types import Chunk, MemoryFormat, Segment

Where = Mapping[str, Any]


class Transfer:
    """The work of an engine's tasks. Keeps no state between calls.

    Each gives a bool for each segment: whether it was moved. record: where it is noted; it ends here.
    """

    def __init__(self, stack: Stack, connector: GPUConnector, events: EventBus, runtime: Runtime) -> None:
        self._stack = stack
        self._connector = connector
        self._events = events
        self._now = runtime.now

    def load(
        self, task: Task, segments: Sequence[Segment], where: Where, *, chain: Chain, gaps: bool, record: RequestTrace,
        into: GPUConnector | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """From the tiers into the engine's KV. gaps: go on behind a segment that is nowhere to be had."""
        connector = into or self._connector
        moved: set[Segment] = set()
        began, nbytes = self._now(), 0
        with record.going_on():
            check_where(connector, segments, where)
            runs = self._stack.loader.fetch(
                segments, self._connector.shape, self._context(task, chain, record), gaps=gaps
            )
            with closing(runs):
                for run in runs:
                    here = [segment for segment, _ in run]
                    chunks = [loaded.chunk for _, loaded in run]
                    if not task.touch(partial(_write, connector, here, chunks, where, record)):
                        break
                    moved.update(here)
                    nbytes += sum(chunk.nbytes for chunk in chunks)
            record.served_tokens = num_tokens = sum(segment.end - segment.start for segment in moved)
        if moved:
            self._events.emit(Event("retrieved", "", num_tokens, len(moved), nbytes, self._now() - began))
        return torch.tensor([segment in moved for segment in segments], dtype=torch.bool)

    def save(
        self, task: Task, segments: Sequence[Segment], where: Where, *, chain: Chain, record: RequestTrace
    ) -> torch.Tensor:
        """From the engine's KV into the tiers that lack it. The mask is of the segments that were copied."""

        def copy(some: Sequence[Segment], chunks: Sequence[Chunk]) -> bool:
            return task.touch(lambda: _read(self._connector, some, chunks, where, record))

        with record.going_on():
            check_where(self._connector, segments, where)
            copied = self._stack.storer.keep(segments, self._connector.shape, copy, self._context(task, chain, record))
            record.served_tokens = sum(segment.end - segment.start for segment in segments)
        return torch.tensor([segment in copied for segment in segments], dtype=torch.bool)

    def warm(self, task: Task, segments: Sequence[Segment], *, chain: Chain, record: RequestTrace) -> torch.Tensor:
        """From the lower tiers into memory."""
        warm: set[Segment] = set()
        with record.going_on():
            runs = self._stack.loader.fetch(
                segments, self._connector.shape, self._context(task, chain, record), gaps=True
            )
            with closing(runs):
                for run in runs:
                    warm.update(segment for segment, _ in run)
                    if task.cancelled:
                        break
            record.served_tokens = sum(segment.end - segment.start for segment in warm)
        return torch.tensor([segment in warm for segment in segments], dtype=torch.bool)

    def _context(self, task: Task, chain: Chain, record: RequestTrace) -> RequestContext:
        context = self._stack.context(chain, record)
        task.on_cancel(context.give_up)
        return context


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


def _write(
    connector: GPUConnector, segments: Sequence[Segment], chunks: Sequence[Chunk], where: Where, record: RequestTrace
) -> None:
    began = record.now()
    fence = connector.write(segments, chunks, **where)
    if fence is not None:
        fence.wait()
    _note_copy(record, began, chunks)


def _read(
    connector: GPUConnector, segments: Sequence[Segment], chunks: Sequence[Chunk], where: Where, record: RequestTrace
) -> None:
    began = record.now()
    fence = connector.read(segments, chunks, **where)
    if fence is not None:
        fence.wait()
    _note_copy(record, began, chunks)


def _note_copy(record: RequestTrace, began: float, chunks: Sequence[Chunk]) -> None:
    record.note("copy", "", began, record.now(), nbytes=sum(chunk.nbytes for chunk in chunks), chunks=len(chunks))
