"""Lossy serializers that get their scales wrong, and what is very lossy and right."""

from __future__ import annotations

import torch

from kvloom import Buffers, Chunk, CorruptBlobError, join
from kvloom_testkit.mutants import Mutant, Oddity
from kvloom_testkit.reference.half_serializer import HalfSerializer


class _Steps(HalfSerializer):
    """Whole numbers of steps of each layer of each plane, in a byte each, behind the steps in float32."""

    levels = 127

    def encode(self, chunk: Chunk) -> Buffers:
        values = chunk.tensor.float().clamp(-1e30, 1e30)
        steps = self.steps_of(values).clamp(min=1e-30)
        counts = (values / steps).round().clamp(-self.levels, self.levels)
        return [steps.contiguous().numpy().tobytes(), counts.to(torch.int8).numpy().tobytes()]

    def steps_of(self, values: torch.Tensor) -> torch.Tensor:
        """`[planes, layers, 1, 1]`."""
        return values.abs().amax(dim=(2, 3), keepdim=True) / self.levels

    def decode(self, blob: Buffers, into: Chunk) -> None:
        data, (planes, layers) = join(blob), into.tensor.shape[:2]
        if len(data) != 4 * planes * layers + into.tensor.numel() or len(blob) != 2:
            raise CorruptBlobError("not as many bytes as the chunk has elements, behind its steps")
        steps = torch.frombuffer(bytearray(data[: 4 * planes * layers]), dtype=torch.float32)
        counts = torch.frombuffer(bytearray(data[4 * planes * layers :]), dtype=torch.int8)
        values = counts.view(into.tensor.shape) * steps.view(planes, layers, 1, 1)
        limit = torch.finfo(into.tensor.dtype).max
        into.tensor.copy_(values.nan_to_num().double().clamp(-limit, limit))


class TakesTheStepsOfK(Mutant, _Steps):
    """Decodes V with the steps of K."""

    breaks = "S02"

    def steps_of(self, values: torch.Tensor) -> torch.Tensor:
        return super().steps_of(values)[:1].expand(values.shape[0], -1, 1, 1)


class DecodesWithTheStepsOfK(Mutant, _Steps):
    """Encodes K and V with their own steps, and decodes both with those of K."""

    breaks = "S02"

    def decode(self, blob: Buffers, into: Chunk) -> None:
        steps = torch.frombuffer(bytearray(blob[0]), dtype=torch.float32).view(into.tensor.shape[0], -1)
        super().decode([steps[:1].expand_as(steps).contiguous().numpy().tobytes(), *blob[1:]], into)


class TakesTheStepsOfLayer0(Mutant, _Steps):
    """Uses the steps of layer 0 for all layers."""

    breaks = "S02"

    def steps_of(self, values: torch.Tensor) -> torch.Tensor:
        return super().steps_of(values)[:, :1].expand(-1, values.shape[1], 1, 1)


class MakesItAllLarger(Mutant, _Steps):
    """Nearly twice."""

    breaks = "S02"

    def decode(self, blob: Buffers, into: Chunk) -> None:
        super().decode(blob, into)
        into.tensor.copy_(
            (into.tensor.double() * 1.9).clamp(*(torch.finfo(into.tensor.dtype).max * s for s in (-1, 1)))
        )


class HasThreeLevels(Oddity, _Steps):
    """Scaled by the largest value: most become zero."""

    levels = 1


class HasOneStepForAll(Oddity, _Steps):
    """Layers, K and V: what is small suffers."""

    levels = 15

    def steps_of(self, values: torch.Tensor) -> torch.Tensor:
        return super().steps_of(values).amax().expand(*values.shape[:2], 1, 1)
