"""The connector meets the requirements of the conformance kit, on each cache that it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache

from kvloom import KVSpec
from kvloom_connector_transformers import TransformersConnector, set_length
from kvloom_connector_transformers.testing import CacheMemory, restored
from kvloom_testkit import ConnectorConformance, ConnectorHarness, EngineMemory
from kvloom_testkit.subjects import SPEC


class StaticMemory(CacheMemory):
    """A StaticCache says how many tokens it holds, apart from its tensors."""

    def set_kv(self, kv: torch.Tensor) -> None:
        super().set_kv(kv)
        set_length(self._cache, kv.shape[2])


def static(spec: KVSpec, num_tokens: int) -> CacheMemory:
    config = LlamaConfig(
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_kv_heads, head_dim=spec.head_size
    )
    cache = StaticCache(config=config, max_cache_len=num_tokens)
    cache.early_initialization(3, spec.num_kv_heads, spec.head_size, spec.torch_dtype, torch.device("cpu"))
    return StaticMemory(spec, cache, [(layer.keys, layer.values) for layer in cache.layers])


def dynamic(spec: KVSpec, num_tokens: int) -> CacheMemory:
    cache, shape = DynamicCache(), (3, spec.num_kv_heads, num_tokens, spec.head_size)
    for layer in range(spec.num_layers):
        cache.update(torch.zeros(shape, dtype=spec.torch_dtype), torch.zeros(shape, dtype=spec.torch_dtype), layer)
    return CacheMemory(spec, cache, [(layer.keys, layer.values) for layer in cache.layers])


def maker(memory: Callable[[KVSpec, int], EngineMemory]) -> Callable[[], ConnectorHarness]:
    return lambda: ConnectorHarness(TransformersConnector(TransformersConnector.Config(), SPEC), memory)


class TestRestoredKV(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], ConnectorHarness]:
        return maker(restored)


class TestStaticCache(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], ConnectorHarness]:
        return maker(static)


class TestDynamicCache(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], ConnectorHarness]:
        return maker(dynamic)
