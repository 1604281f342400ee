"""Connectors with a fault in when they copy, and which layer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kvloom import Chunk, Segment
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.mutants.connectors.calls import LazyFence
from kvloom_testkit.reference.connector import SlotsConnector


class ForgetsToWait(Mutant, SlotsConnector):
    """Its fence does nothing, and the copy is made some time later."""

    breaks = "C09"

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> Any:
        copy = threading.Timer(0.3, super().read, (segments, chunks), where)
        copy.daemon = True
        copy.start()
        return LazyFence(lambda: None)


class WaitsOnce(Mutant, SlotsConnector):
    """The second time there is nothing to wait for."""

    breaks = "C09"

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> Any:
        super().write(segments, chunks, **where)
        waiting = [None]
        return type("Fence", (), {"wait": lambda self: waiting.pop()})()


class WaitsForTheLatestOnly(Mutant, SlotsConnector):
    """All fences are the same one."""

    breaks = "C09"

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> Any:
        self._latest = lambda: SlotsConnector.read(self, segments, chunks, **where)
        return type("Fence", (), {"wait": lambda _: self._latest()})()


class FillsACopyOfTheLayer(Mutant, SlotsConnector):
    """Takes the view to be contiguous."""

    breaks = "C10"

    def read_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        whole = [Chunk(chunk.tensor.contiguous(), chunk.format, chunk.num_tokens) for chunk in chunks]
        super().read_layer(layer, segments, whole, **where)


class ReadsLayersUnchecked(Mutant, SlotsConnector):
    """Relies on `check`, which nobody called."""

    breaks = "C10"

    def read_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            chunk.tensor.copy_(where["pool"][:, layer : layer + 1, where["slots"][segment.start : segment.end]])


class WritesEveryLayer(Mutant, SlotsConnector):
    """Writes every layer, those in use included."""

    breaks = "C11"

    def write_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            where["pool"][:, layer:, where["slots"][segment.start : segment.end]] = chunk.tensor


class WritesTheFirstLayer(Mutant, SlotsConnector):
    """Whichever it is told."""

    breaks = "C11"

    def write_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        super().write_layer(0, segments, chunks, **where)
