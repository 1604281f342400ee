"""The harnesses of kvloom's built-in connectors and of the kit's own: memory for them to work on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvloom import GPUConnector, KVSpec
from kvloom_testkit.connectors.memories import ConnectorHarness, EngineMemory

PAGE_TOKENS = 4
_MARGIN = 8


class TensorMemory(EngineMemory):
    """For `plain`: the tensor is the middle of a longer one, so that it has neighbours."""

    def __init__(self, spec: KVSpec, num_tokens: int) -> None:
        self._all = torch.full(spec.blob_shape(num_tokens + 2 * _MARGIN), 3).to(spec.torch_dtype)
        self._kv = self._all[:, :, _MARGIN:-_MARGIN]

    @property
    def where(self) -> Mapping[str, Any]:
        return {"kv": self._kv}

    def kv(self) -> torch.Tensor:
        return self._kv.clone()

    def set_kv(self, kv: torch.Tensor) -> None:
        self._kv.copy_(kv)

    def surroundings(self) -> bytes:
        beside = torch.cat([self._all[:, :, :_MARGIN], self._all[:, :, -_MARGIN:]], dim=2)
        return beside.contiguous().view(torch.uint8).numpy().tobytes()


class PagesMemory(EngineMemory):
    """Pages of four tokens, whose inside only the engine knows, and a request's table padded with -1."""

    def __init__(self, spec: KVSpec, num_tokens: int) -> None:
        count = -(-num_tokens // PAGE_TOKENS)
        order = torch.randperm(2 * count, generator=torch.Generator().manual_seed(num_tokens))
        self._filled_up = torch.cat([order[:count], torch.tensor([-1, -1])])
        self._table, self._others = self._filled_up[:count], order[count:]
        size = spec.kv_planes * spec.num_layers * PAGE_TOKENS * spec.hidden_dim
        self.pages = torch.full((2 * count, size), 3).to(spec.torch_dtype)

    @property
    def where(self) -> Mapping[str, Any]:
        return {"pages": self.pages, "table": self._filled_up}

    def kv(self) -> torch.Tensor:
        return self.pages[self._table].clone()

    def set_kv(self, kv: torch.Tensor) -> None:
        self.pages[self._table] = kv

    def move(self) -> bool:
        taken, free = self._table.clone(), self._others
        self._table.copy_(free[: len(taken)])
        self._others = torch.cat([taken, free[len(taken) :]])
        return True

    def surroundings(self) -> bytes:
        return self.pages[self._others].view(torch.uint8).numpy().tobytes() + self._filled_up.numpy().tobytes()


def plain(component: Callable[[], GPUConnector]) -> ConnectorHarness:
    return ConnectorHarness(component(), TensorMemory)


def pages(component: Callable[[], GPUConnector]) -> ConnectorHarness:
    return ConnectorHarness(component(), PagesMemory, page_tokens=PAGE_TOKENS)
