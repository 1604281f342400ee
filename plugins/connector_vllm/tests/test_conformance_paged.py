"""The connectors meet the requirements of the conformance kit, by slots and by blocks, on every path."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvloom import KVSpec
from kvloom_connector_vllm import native
from kvloom_connector_vllm.paged.connector import PagedConnector
from kvloom_connector_vllm.paged.nested_tuple import NestedTupleConnector
from kvloom_connector_vllm.testing import (
    BLOCK_TOKENS,
    PagesMemory,
    SlotsHarness,
    SlotsMemory,
    nested_tuple,
    paged,
    pages,
)
from kvloom_testkit import ConnectorConformance, ConnectorHarness
from kvloom_testkit.subjects import SPEC

Make = Callable[[], ConnectorHarness]
LATENT = KVSpec(model="mla", num_layers=2, num_kv_heads=1, head_size=24, dtype="float8_e4m3fn", kv_planes=1)


def connector(spec: KVSpec = SPEC, **settings: object) -> PagedConnector:
    return PagedConnector(PagedConnector.Config.model_validate(settings), spec)


class TestNestedTuple(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Make:
        return lambda: nested_tuple(lambda: NestedTupleConnector(NestedTupleConnector.Config(), SPEC))


class TestSlots(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Make:
        if native.processor() is None:
            pytest.skip("installed without its libraries, because there is no C++ compiler")
        return lambda: paged(connector)


class TestSlotsByTorch(ConnectorConformance):
    @pytest.fixture
    def make(self, monkeypatch: pytest.MonkeyPatch) -> Make:
        monkeypatch.setattr(native, "processor", lambda: None)
        return lambda: paged(connector)


class TestBlocks(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Make:
        return lambda: ConnectorHarness(connector(), pages, page_tokens=BLOCK_TOKENS)


def latent(spec: KVSpec, num_tokens: int) -> SlotsMemory:
    """Memory in the form of MLA, `[blocks, tokens, content]`."""
    blocks = 2 * -(-num_tokens // BLOCK_TOKENS)
    layers = torch.zeros(spec.num_layers, blocks, BLOCK_TOKENS, spec.head_size, dtype=spec.torch_dtype)
    return SlotsMemory(list(layers), [[layer.unsqueeze(2) for layer in layers]], num_tokens)


class TestLatent(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Make:
        return lambda: SlotsHarness(connector(LATENT), latent)


def across_layers(spec: KVSpec, num_tokens: int) -> PagesMemory:
    """All layers in one tensor, block by block: BLHNC."""
    blocks = 2 * -(-num_tokens // BLOCK_TOKENS)
    shape = (blocks, spec.num_layers, spec.num_kv_heads, BLOCK_TOKENS, 2 * spec.head_size)
    whole = torch.zeros(shape, dtype=spec.torch_dtype)
    layers = whole.permute(1, 0, 3, 2, 4)
    planes = [list(plane) for plane in layers.split(spec.head_size, -1)]
    return PagesMemory(whole, planes, num_tokens)


class TestAcrossLayers(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Make:
        return lambda: ConnectorHarness(connector(layout="BLHNC"), across_layers, page_tokens=BLOCK_TOKENS)
