"""Serializers with a fault in what they say about themselves, and in what their settings change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from kvloom import EXACT, Buffers, Chunk, Config
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.mutants.serializers.levels import LevelConfig, LevelledSerializer, xored
from kvloom_testkit.reference.half_serializer import HalfSerializer
from kvloom_testkit.reference.serializer import RowsSerializer


class PutsADtypeInItsParams(Mutant, RowsSerializer):
    """A dtype is not JSON."""

    breaks = "S15"

    @property
    def params(self) -> Mapping[str, Any]:
        return {"dtype": torch.bfloat16}


class CountsInItsParams(Mutant, RowsSerializer):
    """Says something else each time."""

    breaks = "S15"
    _calls = 0

    @property
    def params(self) -> Mapping[str, Any]:
        self._calls += 1
        return {"call": self._calls}


class CallsItselfExact(Mutant, HalfSerializer):
    """Is lossy, and does not say so."""

    breaks = "S20"

    @property
    def fidelity(self) -> str:
        return EXACT


class CallsItselfLossy(Mutant, RowsSerializer):
    """Is lossless, and gives its own name."""

    breaks = "S20"

    @property
    def fidelity(self) -> str:
        return self.type


class DecodesByItsLevel(Mutant, RowsSerializer):
    """Decodes by its own level, not by the blob's."""

    breaks = "S21"
    Config = LevelConfig

    def encode(self, chunk: Chunk) -> Buffers:
        return xored(super().encode(chunk), self.config.level & 0xFF)  # type: ignore[attr-defined]

    def decode(self, blob: Buffers, into: Chunk) -> None:
        super().decode(xored(blob, self.config.level & 0xFF), into)  # type: ignore[attr-defined]


class OrderConfig(Config):
    """With a choice that may be left out."""

    order: Literal["forward", "backward"] | None = None


class DecodesByItsParams(Mutant, RowsSerializer):
    """Its own params may differ from the blob's."""

    breaks = "S21"
    Config = OrderConfig

    @property
    def params(self) -> Mapping[str, Any]:
        return {"order": self.config.order}  # type: ignore[attr-defined]

    def encode(self, chunk: Chunk) -> Buffers:
        return xored(super().encode(chunk), 0x55 if self.params["order"] == "backward" else 0)

    def decode(self, blob: Buffers, into: Chunk) -> None:
        super().decode(xored(blob, 0x55 if self.params["order"] == "backward" else 0), into)


class DecodesLayersByItsLevel(Mutant, LevelledSerializer):
    """And whole chunks as it should."""

    breaks = "S21"

    def decode_layers(self, blob: Buffers, layers: range, into: Chunk) -> None:
        RowsSerializer.decode_layers(self, xored(blob[1:], self.level), layers, into)


class SetsTheDefaultDtype(Mutant, HalfSerializer):
    """So that its own tensors need not say theirs."""

    breaks = "S22"

    def encode(self, chunk: Chunk) -> Buffers:
        torch.set_default_dtype(torch.float16)
        return super().encode(chunk)


class RoundsAtRandom(Mutant, HalfSerializer):
    """Rounds by random numbers from the generator that the model samples with."""

    breaks = "S22"

    def narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().narrow(tensor + torch.rand(tensor.shape) * 1e-6)
