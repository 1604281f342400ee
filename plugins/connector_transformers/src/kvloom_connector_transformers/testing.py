"""For `kvloom check connector transformers`: memory that the kit can look into. Imported by the kit only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvloom import GPUConnector, KVSpec
from kvloom_testkit import ConnectorHarness, EngineMemory

from .connector import Planes
from .restored import RestoredKV

ROW = 1
"""The request's row of three: there is one before it and one behind it."""


class CacheMemory(EngineMemory):
    """A cache of three rows, the one in the middle being the request's. planes: K and V of each layer."""

    def __init__(self, spec: KVSpec, cache: Any, planes: Planes) -> None:
        self._heads = (spec.num_kv_heads, spec.head_size)
        self._cache, self._planes = cache, planes
        for tensor in self._tensors():
            tensor.fill_(3)

    @property
    def where(self) -> Mapping[str, Any]:
        return {"cache": self._cache, "row": ROW}

    def kv(self) -> torch.Tensor:
        planes = [torch.stack([pair[plane][ROW] for pair in self._planes]) for plane in range(2)]
        return torch.stack(planes).transpose(2, 3).flatten(-2).contiguous()

    def set_kv(self, kv: torch.Tensor) -> None:
        split = kv.unflatten(-1, self._heads).transpose(2, 3)
        for layer, pair in enumerate(self._planes):
            for plane, tensor in enumerate(pair):
                tensor[ROW] = split[plane, layer]

    def surroundings(self) -> bytes:
        others = [tensor[[row for row in range(len(tensor)) if row != ROW]] for tensor in self._tensors()]
        return b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in others)

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for pair in self._planes for tensor in pair]


def restored(spec: KVSpec, num_tokens: int) -> CacheMemory:
    """Memory that is a `RestoredKV`."""
    cache = RestoredKV.allocate(spec, num_tokens, rows=3)
    return CacheMemory(spec, cache, list(zip(cache.keys, cache.values, strict=True)))


def harness(connector: Callable[[], GPUConnector]) -> ConnectorHarness:
    """The harness of this package's connector."""
    return ConnectorHarness(connector(), restored)
