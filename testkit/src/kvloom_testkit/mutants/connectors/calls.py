"""Connectors with a fault each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvloom import Chunk, Segment
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.connector import SlotsConnector

Where = Mapping[str, Any]


class SwapsWhatItReads(Mutant, SlotsConnector):
    """V, then K."""

    breaks = "C01"

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        super().read(segments, chunks, pool=where["pool"].flip(0), slots=where["slots"])


class ReadsOneTokenLate(Mutant, SlotsConnector):
    """Counts from one."""

    breaks = "C01"

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        super().read(segments, chunks, pool=where["pool"], slots=where["slots"].roll(-1))


class TakesMemoryToBeZero(Mutant, SlotsConnector):
    """Copies only what is not zero."""

    breaks = "C01"

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            values = where["pool"][:, :, where["slots"][segment.start : segment.end]]
            wanted = values.float().abs() > 1e-30
            chunk.tensor[wanted] = values[wanted]


class SwapsWhatItWrites(Mutant, SlotsConnector):
    """V, then K."""

    breaks = "C02"

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            where["pool"][:, :, where["slots"][segment.start : segment.end]] = chunk.tensor.flip(0)


class WritesCleanNumbers(Mutant, SlotsConnector):
    """NaN becomes zero."""

    breaks = "C02"

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            where["pool"][:, :, where["slots"][segment.start : segment.end]] = chunk.tensor.nan_to_num()


class WritesANeighbouringSlot(Mutant, SlotsConnector):
    """Beside its own, the one behind the last: it may be anybody's."""

    breaks = "C03"

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        super().write(segments, chunks, **where)
        pool, slots = where["pool"], where["slots"]
        for segment, chunk in zip(segments, chunks, strict=True):
            behind = (int(slots[segment.end - 1]) + 1) % pool.shape[2]
            if behind not in slots[segment.start : segment.end]:
                pool[:, :, behind] = chunk.tensor[:, :, -1]


class WritesWholePages(Mutant, SlotsConnector):
    """Fills up the last eight slots with zeros."""

    breaks = "C03"

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment in segments:
            where["pool"][:, :, where["slots"][segment.end : -(-segment.end // 8) * 8]] = 0
        super().write(segments, chunks, **where)


class SortsThePageTable(Mutant, SlotsConnector):
    """Slots are faster in order, and the engine's own table is at hand."""

    breaks = "C03"

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        super().write(segments, chunks, **where)
        where["slots"].copy_(where["slots"].sort().values)


class KeepsAnAddress(Mutant, SlotsConnector):
    """Writes back what the memory that it read from holds by now."""

    breaks = "C04"
    _read: dict[bytes, tuple[Where, Segment]] = {}  # noqa: RUF012

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        super().read(segments, chunks, **where)
        type(self)._read.update({each.key.digest: (where, each) for each in segments})

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for each, chunk in zip(segments, chunks, strict=True):
            there, segment = type(self)._read.get(each.key.digest, (where, each))
            fresh = torch.empty_like(chunk.tensor)
            SlotsConnector.read(self, [segment], [Chunk(fresh, chunk.format, chunk.num_tokens)], **there)
            super().write([each], [Chunk(fresh, chunk.format, chunk.num_tokens)], **where)


class TakesAllToBeLikeTheFirst(Mutant, SlotsConnector):
    """One launch for segments of one length."""

    breaks = "C05"

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        size = segments[0].end - segments[0].start
        for segment, chunk in zip(segments, chunks, strict=True):
            end = min(segment.end, segment.start + size)
            where["pool"][:, :, where["slots"][segment.start : end]] = chunk.tensor[:, :, : end - segment.start]


class TakesSegmentsToLieSideBySide(Mutant, SlotsConnector):
    """One copy from the first start to the last end."""

    breaks = "C05"

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        at = segments[0].start
        for chunk in chunks:
            chunk.tensor.copy_(where["pool"][:, :, where["slots"][at : at + chunk.num_tokens]])
            at += chunk.num_tokens


class LaunchesOnce(Mutant, SlotsConnector):
    """Launches one block per token, and drops the tokens beyond the largest launch."""

    breaks = "C05"

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            slots = where["slots"][segment.start : segment.end][:1024]
            where["pool"][:, :, slots] = chunk.tensor[:, :, :1024]


class TakesSomeSegments(Mutant, SlotsConnector):
    """As many as its table of arguments has room for."""

    breaks = "C05"

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        super().read(segments[:256], chunks[:256], **where)


class EmptiesWhatItRead(Mutant, SlotsConnector):
    """Moves instead of copying."""

    breaks = "C06"

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        super().read(segments, chunks, **where)
        for segment in segments:
            where["pool"][:, :, where["slots"][segment.start : segment.end]] = 0


class CleansChunksInPlace(Mutant, SlotsConnector):
    """Memory that others read from."""

    breaks = "C06"

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        super().write(segments, chunks, **where)
        for chunk in chunks:
            chunk.tensor.nan_to_num_()


class NeverChecks(Mutant, SlotsConnector):
    """Relies on its callers."""

    breaks = "C07"

    def check(self, where: Where, num_tokens: int) -> None:
        pass


class ChecksNoLength(Mutant, SlotsConnector):
    """Looks at types and shapes only."""

    breaks = "C07"

    def check(self, where: Where, num_tokens: int) -> None:
        super().check(where, min(num_tokens, 1))


class CountsNoDimensions(Mutant, SlotsConnector):
    """A table of several requests, of which it takes one to be meant."""

    breaks = "C07"

    def check(self, where: Where, num_tokens: int) -> None:
        slots = where.get("slots")
        super().check({**where, "slots": slots.flatten()} if isinstance(slots, torch.Tensor) else where, num_tokens)


class RoundsItsIndices(Mutant, SlotsConnector):
    """Converts whatever it is given."""

    breaks = "C07"

    def check(self, where: Where, num_tokens: int) -> None:
        slots = where.get("slots")
        super().check({**where, "slots": slots.long()} if isinstance(slots, torch.Tensor) else where, num_tokens)


class WantsMoreThanOneSlot(Mutant, SlotsConnector):
    """Compares the first and the last."""

    breaks = "C07"

    def check(self, where: Where, num_tokens: int) -> None:
        super().check(where, num_tokens)
        if where["slots"].min() == where["slots"].max():
            raise ValueError("slots: all the same")


class TakesSmallerHeads(Mutant, SlotsConnector):
    """There is room for them."""

    breaks = "C07"

    def _check(self, pool: Any, slots: Any, num_tokens: int) -> None:
        if isinstance(pool, torch.Tensor) and pool.dim() == 4 and self.spec is not None:
            pool = torch.nn.functional.pad(pool, (0, max(self.spec.hidden_dim - pool.shape[3], 0)))
        super()._check(pool, slots, num_tokens)


class RaisesKeyErrors(Mutant, SlotsConnector):
    """Whatever comes up."""

    breaks = "C07"

    def check(self, where: Where, num_tokens: int) -> None:
        self._check(where["pool"], where["slots"], num_tokens)


class PutsLayersFirst(Mutant, SlotsConnector):
    """`[layers, planes, tokens, hidden]`."""

    breaks = "C08"

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        planes, layers, tokens, hidden = super().shape(num_tokens)
        return (layers, planes, tokens, hidden)


class LazyFence:
    """Runs a function at the first wait."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run, self._ran, self._lock = run, False, threading.Lock()

    def wait(self) -> None:
        with self._lock:
            if not self._ran:
                self._run()
            self._ran = True


class RepresentsItsAddress(Mutant, SlotsConnector):
    """Puts its own address into the representation, so that no other connector finds its chunks."""

    breaks = "C12"

    @property
    def representation(self) -> Mapping[str, Any]:
        return {"connector": id(self)}


class RepresentsADtype(Mutant, SlotsConnector):
    """A dtype is not JSON."""

    breaks = "C12"

    @property
    def representation(self) -> Mapping[str, Any]:
        return {"dtype": torch.bfloat16}


class WritesWholeEights(Mutant, SlotsConnector):
    """The remainder is skipped."""

    breaks = "C13"

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        for segment, chunk in zip(segments, chunks, strict=True):
            count = chunk.num_tokens // 8 * 8
            where["pool"][:, :, where["slots"][segment.start : segment.start + count]] = chunk.tensor[:, :, :count]


class ClosesOnce(Mutant, SlotsConnector):
    """Raises at the second `close`."""

    breaks = "C14"

    def close(self) -> None:
        del self.config
