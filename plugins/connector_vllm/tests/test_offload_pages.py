"""`vllm_offload` meets the requirements of the conformance kit, with pieces of two ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvloom import KVSpec
from kvloom_connector_vllm.offload.pages import OffloadPagesConnector
from kvloom_connector_vllm.offload.settings import OffloadPagesConfig, PieceGeometry
from kvloom_testkit import ConnectorConformance, ConnectorHarness, EngineMemory
from kvloom_testkit.subjects import SPEC

BYTE_SPEC = replace(SPEC, dtype="uint8")


def sizes(spec: KVSpec) -> list[int]:
    """Sizes of a piece in each rank."""
    return [spec.num_layers * spec.head_size * part for part in (3, 5)]


class SlotMemory(EngineMemory):
    """Pieces in the slots of two ranks, in no order, among those of others."""

    def __init__(self, spec: KVSpec, num_tokens: int) -> None:
        chance = torch.Generator().manual_seed(num_tokens)
        self._slots = torch.randperm(2 * num_tokens + 3, generator=chance)[:num_tokens].tolist()
        self._rows = [torch.full((2 * num_tokens + 3, size), 3.0).to(spec.torch_dtype) for size in sizes(spec)]

    @property
    def where(self) -> Mapping[str, Any]:
        return {"rows": list(self._rows), "slots": list(self._slots)}

    def kv(self) -> torch.Tensor:
        return torch.cat([row[self._slots] for row in self._rows], dim=1)

    def set_kv(self, kv: torch.Tensor) -> None:
        for row, part in zip(self._rows, kv.split([row.shape[1] for row in self._rows], dim=1), strict=True):
            row[self._slots] = part

    def surroundings(self) -> bytes:
        rest = [slot for slot in range(len(self._rows[0])) if slot not in self._slots]
        return b"".join(row[rest].numpy().tobytes() for row in self._rows)


class TestPieces(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], ConnectorHarness]:
        def harness() -> ConnectorHarness:
            config = OffloadPagesConfig(geometry=PieceGeometry(piece_bytes=sizes(BYTE_SPEC)))
            return ConnectorHarness(OffloadPagesConnector(config, BYTE_SPEC), SlotMemory, 1)

        return harness
