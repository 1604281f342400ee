"""Serializers with a fault in what they make of bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvloom import Buffer, Buffers, Chunk, CorruptBlobError
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.mutants.serializers.calls import with_tensor
from kvloom_testkit.mutants.serializers.levels import xored
from kvloom_testkit.reference.serializer import RowsSerializer


class FillsUpWhatIsLacking(Mutant, RowsSerializer):
    """Accepts a blob that is cut off."""

    breaks = "S06"

    def decode(self, blob: Buffers, into: Chunk) -> None:
        data = b"".join(bytes(buffer) for buffer in blob)[: into.nbytes]
        into.tensor.view(-1).view(torch.uint8).zero_()
        if data:
            into.tensor.view(-1).view(torch.uint8)[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)


class IgnoresTheRest(Mutant, RowsSerializer):
    """Accepts what comes after the end."""

    breaks = "S06"

    def decode(self, blob: Buffers, into: Chunk) -> None:
        data, step = b"".join(bytes(buffer) for buffer in blob)[: into.nbytes], into.nbytes // len(self.encode(into))
        super().decode([data[start : start + step] for start in range(0, into.nbytes, step)], into)


class RaisesWhatItLikes(Mutant, RowsSerializer):
    """Lets the library's exception out."""

    breaks = "S06"

    def decode(self, blob: Buffers, into: Chunk) -> None:
        try:
            super().decode(blob, into)
        except CorruptBlobError as error:
            raise ValueError(str(error)) from None


class BelievesItsHeader(Mutant, RowsSerializer):
    """Parses whatever is there."""

    breaks = "S07"

    def encode(self, chunk: Chunk) -> Buffers:
        return [json.dumps({"parts": [*range(len(super().encode(chunk)))]}).encode(), *super().encode(chunk)]

    def decode(self, blob: Buffers, into: Chunk) -> None:
        if len(blob) != len(super().encode(into)) + 1:
            raise CorruptBlobError("another number of buffers")
        order = json.loads(bytes(blob[0]))["parts"]
        super().decode([blob[1:][number] for number in order], into)


class CopiesItsView(Mutant, RowsSerializer):
    """A tensor of its own."""

    breaks = "S13"

    def view(self, blob: memoryview, like: Chunk) -> Chunk | None:
        found = super().view(blob, like)
        return found and with_tensor(found, found.tensor.clone())


class SeldomHasAView(Mutant, RowsSerializer):
    """Returns None where it could return a view, and lets the library's errors out."""

    breaks = "S13"

    def view(self, blob: memoryview, like: Chunk) -> Chunk | None:
        if blob.nbytes == like.nbytes:
            return None
        tensor = torch.frombuffer(blob, dtype=torch.uint8).view(like.tensor.dtype).view(like.tensor.shape)
        return Chunk(tensor, like.format, like.num_tokens, like.fidelity)


class ViewsTheBeginning(Mutant, RowsSerializer):
    """Whatever comes after it."""

    breaks = "S13"

    def view(self, blob: memoryview, like: Chunk) -> Chunk | None:
        return super().view(blob[: like.nbytes], like)


class ForgetsV(Mutant, RowsSerializer):
    """The buffers of a layer are those of its K."""

    breaks = "S14"

    def layer_buffers(
        self, lengths: Sequence[int], like: Chunk, params: Mapping[str, Any]
    ) -> Sequence[Sequence[int]] | None:
        found = super().layer_buffers(lengths, like, params)
        return found and [each[:1] for each in found]

    def decode_layers(self, blob: Buffers, layers: range, into: Chunk) -> None:
        super().decode_layers([*blob, *blob][: into.tensor.shape[0] * len(layers)], layers, into)


class TakesLayersToBeContiguous(Mutant, RowsSerializer):
    """Fills a copy."""

    breaks = "S14"

    def decode_layers(self, blob: Buffers, layers: range, into: Chunk) -> None:
        super().decode_layers(blob, layers, with_tensor(into, into.tensor.contiguous()))


class CountsLayersFromTheFirst(Mutant, RowsSerializer):
    """Decodes a layer as if it was another one."""

    breaks = "S14"

    def encode(self, chunk: Chunk) -> Buffers:
        return self._numbered(super().encode(chunk), range(chunk.tensor.shape[1]))

    def decode(self, blob: Buffers, into: Chunk) -> None:
        super().decode(self._numbered(blob, range(into.tensor.shape[1])), into)

    def decode_layers(self, blob: Buffers, layers: range, into: Chunk) -> None:
        super().decode_layers(self._numbered(blob, range(len(layers))), layers, into)

    def _numbered(self, blob: Buffers, layers: range) -> Buffers:
        return [xored([buffer], layer)[0] for buffer, layer in zip(blob, itertools.cycle(layers), strict=False)]


class NeverReadsByLayer(Mutant, RowsSerializer):
    """Claims what it does not do."""

    breaks = "S14"

    def layer_buffers(
        self, lengths: Sequence[int], like: Chunk, params: Mapping[str, Any]
    ) -> Sequence[Sequence[int]] | None:
        return None


class WantsBytes(Mutant, RowsSerializer):
    """Calls a method that only bytes have."""

    breaks = "S16"

    def decode(self, blob: Buffers, into: Chunk) -> None:
        super().decode([buffer.rjust(0) for buffer in blob], into)  # type: ignore[union-attr]


class DecodesInPlace(Mutant, RowsSerializer):
    """Saves a copy where it can."""

    breaks = "S16"

    def encode(self, chunk: Chunk) -> Buffers:
        return xored(super().encode(chunk), 0x55)

    def decode(self, blob: Buffers, into: Chunk) -> None:
        super().decode([self._clear(buffer) for buffer in blob], into)

    def _clear(self, buffer: Buffer) -> Buffer:
        (clear,) = xored([buffer], 0x55)
        view = memoryview(buffer)
        if view.readonly:
            return clear
        view[:] = clear
        return view


class ReusesItsBuffer(Mutant, RowsSerializer):
    """The next chunk goes where this one is."""

    breaks = "S18"

    def encode(self, chunk: Chunk) -> Buffers:
        data = b"".join(super().encode(chunk))
        scratch: bytearray = self.__dict__.setdefault("_scratch", bytearray(1 << 24))
        scratch[: len(data)] = data
        step = len(data) // len(super().encode(chunk))
        return [memoryview(scratch)[start : start + step] for start in range(0, len(data), step)]


class ReturnsAnEmptyTable(Mutant, RowsSerializer):
    """Returns rows of two where there are none."""

    breaks = "S18"

    def encode(self, chunk: Chunk) -> Buffers:
        return [*super().encode(chunk), memoryview(torch.empty(0, 2, dtype=torch.uint8).numpy())]  # type: ignore[arg-type]

    def decode(self, blob: Buffers, into: Chunk) -> None:
        super().decode(blob[:-1], into)


class ReturnsArrays(Mutant, RowsSerializer):
    """Arrays are not bytes."""

    breaks = "S18"

    def encode(self, chunk: Chunk) -> Buffers:
        return [memoryview(buffer).cast("B").tolist() for buffer in super().encode(chunk)]  # type: ignore[misc]
