"""A host pool such as HiCache has, small and made of nothing but torch, and with it what the kit needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvloom import GPUConnector, KVSpec
from kvloom_testkit import SPEC, ConnectorHarness, EngineMemory

from .connector import SGLangConnector
from .settings import Geometry, SGLangConfig

PAGE_TOKENS = 4


class HostPool:
    """K and V of all layers, token by token: `layer_first` `[2, layers, rows, heads, size]`, or `page_first`
    `[2, rows, layers, heads, size]`."""

    start_layer = 0

    def __init__(self, spec: KVSpec, *, pages: int, page_size: int = PAGE_TOKENS, layout: str = "layer_first") -> None:
        self.layer_num, self.head_num, self.head_dim = spec.num_layers, spec.num_kv_heads, spec.head_size
        self.end_layer = self.layer_num
        self.dtype, self.layout, self.page_size, self.size = spec.torch_dtype, layout, page_size, pages * page_size
        self._row_dim = {"layer_first": 2, "page_first": 1}[layout]
        dims = [2, self.layer_num, self.head_num, self.head_dim]
        dims.insert(self._row_dim, self.size)
        self.kv_buffer = torch.zeros(dims, dtype=self.dtype)

    def page(self, index: int) -> torch.Tensor:
        return self.kv_buffer.narrow(self._row_dim, index, self.page_size)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.page(index).flatten() if flat else self.page(index)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.page(0)).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self.page(index)
        page.copy_(data_page.reshape(page.shape))


class PoolMemory(EngineMemory):
    """A request whose pages are in reverse order in a pool, with a foreign page between each two."""

    def __init__(self, spec: KVSpec, num_tokens: int, layout: str = "layer_first") -> None:
        count = num_tokens // PAGE_TOKENS
        self._pool = HostPool(spec, pages=2 * count + 1, layout=layout)
        self._pool.kv_buffer.view(torch.uint8).fill_(3)
        self._rows = torch.arange(2 * count - 1, 0, -2) * PAGE_TOKENS

    @property
    def where(self) -> Mapping[str, Any]:
        return {"pool": self._pool, "rows": self._rows}

    def kv(self) -> torch.Tensor:
        return torch.stack([self._pool.page(int(row)).clone() for row in self._rows])

    def set_kv(self, kv: torch.Tensor) -> None:
        for row, page in zip(self._rows, kv, strict=True):
            self._pool.page(int(row)).copy_(page)

    def move(self) -> bool:
        self._rows.copy_(self._rows.flip(0) - PAGE_TOKENS)
        return True

    def surroundings(self) -> bytes:
        mine = set(self._rows.tolist())
        others = [row for row in range(0, self._pool.size, PAGE_TOKENS) if row not in mine]
        kept = [self._pool.page(row).contiguous().view(torch.uint8) for row in others]
        return b"".join(page.numpy().tobytes() for page in kept) + self._rows.numpy().tobytes()


def make() -> GPUConnector:
    elements = HostPool(SPEC, pages=1).get_dummy_flat_data_page().numel()
    return SGLangConnector(SGLangConfig(geometry=Geometry(page_tokens=PAGE_TOKENS, page_elements=elements)), SPEC)


def harness(connector: Callable[[], GPUConnector] = make, layout: str = "layer_first") -> ConnectorHarness:
    """The harness of this package's connector, which has no settings that a person could write."""
    return ConnectorHarness(make(), lambda spec, tokens: PoolMemory(spec, tokens, layout), page_tokens=PAGE_TOKENS)
