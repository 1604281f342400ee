"""Connectors with a fault in whose KV they move, and what they do to the process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from kvloom import Chunk, Segment
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.connector import SlotsConnector


class KeepsThePageTable(Mutant, SlotsConnector):
    """The first request's table serves all that follow."""

    breaks = "C15"

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        kept = self.__dict__.setdefault("_where", where)
        super().write(segments, chunks, **kept)


class KeepsWhatItRead(Mutant, SlotsConnector):
    """Caches chunks by segment, for every request."""

    breaks = "C15"

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        kept = self.__dict__.setdefault("_kept", {})
        for segment, chunk in zip(segments, chunks, strict=True):
            if segment not in kept:
                super().read([segment], [chunk], **where)
                kept[segment] = chunk.tensor.clone()
            chunk.tensor.copy_(kept[segment])


class SharesItsStaging(Mutant, SlotsConnector):
    """One buffer for all threads."""

    breaks = "C16"

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            self._staging = where["pool"][:, :, where["slots"][segment.start : segment.end]]
            time.sleep(0.001)
            chunk.tensor.copy_(self._staging)


class KeepsATableForEachTensor(Mutant, SlotsConnector):
    """Keeps the result for a tensor as long as it is the same object."""

    breaks = "C15"

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        kept = self.__dict__.setdefault("_tables", {})  # tensors are equal if they are the same object
        super().read(
            segments, chunks, pool=where["pool"], slots=kept.setdefault(where["slots"], where["slots"].clone())
        )


class KeepsATableForEachAddress(Mutant, SlotsConnector):
    """And notices what is written into it, but not that it is another one."""

    breaks = "C15"

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        slots = where["slots"]
        kept = self.__dict__.setdefault("_tables", {}).setdefault((id(slots), slots._version), slots.clone())
        super().write(segments, chunks, pool=where["pool"], slots=kept)


class KeepsATableForItsLayers(Mutant, SlotsConnector):
    """The first layer's table serves the other layers, and later requests."""

    breaks = "C15"

    def write_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        if layer == 0 and where["slots"] not in self.__dict__.setdefault("_tables", {}):
            self._tables[where["slots"]] = where["slots"].clone()
        super().write_layer(layer, segments, chunks, pool=where["pool"], slots=self._tables[where["slots"]])


class WritesLayersOnAThreadOfItsOwn(Mutant, SlotsConnector):
    """Writes layers on its own thread, which is not in inference mode."""

    breaks = "C17"

    def write_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            where["pool"][:, layer : layer + 1, where["slots"][segment.start : segment.end]] = chunk.tensor


class KnowsNoInferenceMode(Mutant, SlotsConnector):
    """Writes as if all tensors were of its thread."""

    breaks = "C17"

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            where["pool"][:, :, where["slots"][segment.start : segment.end]] = chunk.tensor


class SetsTheThreads(Mutant, SlotsConnector):
    """Sets torch's number of threads for its own copies."""

    breaks = "C18"

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        torch.set_num_threads(torch.get_num_threads() + 1)
        super().read(segments, chunks, **where)


class SwitchesGradientsOff(Mutant, SlotsConnector):
    """Switches gradients off and never on again."""

    breaks = "C18"

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        torch.set_grad_enabled(False)
        super().write(segments, chunks, **where)
