"""Memory and a harness, with which the kit tests this package's connector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvloom import GPUConnector, KVSpec
from kvloom_testkit import SPEC, ConnectorHarness, EngineMemory, HostPool

from .connector import SGLangConnector
from .settings import Geometry, SGLangConfig

PAGE_TOKENS = 4


def pool_of(spec: KVSpec, pages: int, *, kind: type[HostPool] = HostPool, **settings: Any) -> HostPool:
    """A host pool for a model."""
    return kind(
        layers=spec.num_layers, heads=spec.num_kv_heads, head_size=spec.head_size, dtype=spec.torch_dtype, pages=pages,
        **{"page_size": PAGE_TOKENS, **settings},
    )  # fmt: skip


class PoolMemory(EngineMemory):
    """A request whose pages are in reverse order in a pool, with a foreign page between each two."""

    def __init__(self, spec: KVSpec, num_tokens: int, layout: str = "layer_first") -> None:
        count = num_tokens // PAGE_TOKENS
        self._pool = pool_of(spec, 2 * count + 1, layout=layout)
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
    elements = pool_of(SPEC, 1).get_dummy_flat_data_page().numel()
    return SGLangConnector(SGLangConfig(geometry=Geometry(page_tokens=PAGE_TOKENS, page_elements=elements)), SPEC)


def harness(connector: Callable[[], GPUConnector] = make, layout: str = "layer_first") -> ConnectorHarness:
    """The harness of this package's connector, which has no settings that a person could write."""
    return ConnectorHarness(make(), lambda spec, tokens: PoolMemory(spec, tokens, layout), page_tokens=PAGE_TOKENS)
