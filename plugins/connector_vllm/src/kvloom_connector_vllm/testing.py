"""For `kvloom check connector paged` and the like: memory that the kit can look into. Imported by the kit only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvloom import GPUConnector, KVSpec
from kvloom_testkit import ConnectorHarness, EngineMemory

from .native import kernels

BLOCK_TOKENS = 4
_MARGIN = 3


class PagesMemory(EngineMemory):
    """Twice as many blocks as the request needs, those of the request anywhere among them.

    planes: of each plane, of each layer, a view `[blocks, block size, heads, head size]`, through which the tests look.
    """

    def __init__(self, kvcaches: Any, planes: Sequence[Sequence[torch.Tensor]], num_tokens: int) -> None:
        self._kvcaches, self._planes, self._num_tokens = kvcaches, planes, num_tokens
        count, total = -(-num_tokens // BLOCK_TOKENS), len(planes[0][0])
        order = torch.randperm(total, generator=torch.Generator().manual_seed(num_tokens))
        self._filled_up = torch.cat([order[:count], torch.tensor([-1, -1])])
        self._others = order[count:]
        for view in (view for layers in planes for view in layers):
            view.copy_(torch.full(view.shape, 3))

    @property
    def _table(self) -> torch.Tensor:
        return self._filled_up[:-2]

    @property
    def _slots(self) -> torch.Tensor:
        every = self._table[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
        return every.flatten()[: self._num_tokens]

    @property
    def where(self) -> Mapping[str, Any]:
        return {"kvcaches": self._kvcaches, "block_table": self._filled_up}

    def kv(self) -> torch.Tensor:
        slots = self._slots.to(self._planes[0][0].device)
        found = [[view[slots // BLOCK_TOKENS, slots % BLOCK_TOKENS] for view in layers] for layers in self._planes]
        return torch.stack([torch.stack(layers) for layers in found]).flatten(-2).cpu()

    def set_kv(self, kv: torch.Tensor) -> None:
        slots = self._slots.to(self._planes[0][0].device)
        for layers, values in zip(self._planes, kv, strict=True):
            for view, rows in zip(layers, values, strict=True):
                view[slots // BLOCK_TOKENS, slots % BLOCK_TOKENS] = rows.view(-1, *view.shape[2:]).to(view.device)

    def move(self) -> bool:
        taken, free = self._table.clone(), self._others
        self._table.copy_(free[: len(taken)])
        self._others = torch.cat([taken, free[len(taken) :]])
        return True

    def surroundings(self) -> bytes:
        views = [view for layers in self._planes for view in layers]
        mine = torch.zeros(views[0].shape[:2], dtype=torch.bool)
        mine.view(-1)[self._slots] = True
        beside = [view.cpu()[~mine].view(torch.uint8).numpy().tobytes() for view in views]
        return b"".join(beside) + self._filled_up.numpy().tobytes()


class SlotsMemory(PagesMemory):
    """The same, by slots. What others have of the last block does not belong to the request."""

    def __init__(self, kvcaches: Any, planes: Sequence[Sequence[torch.Tensor]], num_tokens: int) -> None:
        super().__init__(kvcaches, planes, num_tokens)
        self._mapping = torch.empty(num_tokens, dtype=torch.int32)
        self._mapping.copy_(self._slots)

    @property
    def where(self) -> Mapping[str, Any]:
        return {"kvcaches": self._kvcaches, "slot_mapping": self._mapping}

    def move(self) -> bool:
        super().move()
        self._mapping.copy_(self._slots)
        return True

    def surroundings(self) -> bytes:
        return super().surroundings() + self._mapping.numpy().tobytes()


class SlotsHarness(ConnectorHarness):
    """A slot of -1 means something: such a token is left alone. What means nothing is refused."""

    def indices_out_of_range(self, name: str) -> dict[str, Mapping[str, Any]]:
        wrong = super().indices_out_of_range(name)
        return {what: where for what, where in wrong.items() if not what.startswith("-1 ")}


def joined(spec: KVSpec, blocks: int, device: str = "cpu") -> tuple[Any, list[list[torch.Tensor]]]:
    """Pages as vLLM 0.32 has them: `[B, H, N, C]`, K and V side by side in C, tokens before heads in memory."""
    shape = (blocks, BLOCK_TOKENS, spec.num_kv_heads, spec.kv_planes * spec.head_size)
    layers = [torch.zeros(shape, dtype=spec.torch_dtype, device=device) for _ in range(spec.num_layers)]
    planes = [list(each) for each in zip(*(layer.split(spec.head_size, -1) for layer in layers), strict=True)]
    return [layer.transpose(1, 2) for layer in layers], planes


def pages(spec: KVSpec, num_tokens: int, device: str = "cpu") -> PagesMemory:
    """With a block table. The last block is the request's to its end."""
    return PagesMemory(*joined(spec, 2 * -(-num_tokens // BLOCK_TOKENS), device), num_tokens)


def slots(spec: KVSpec, num_tokens: int, device: str = "cpu") -> SlotsMemory:
    """With a slot mapping."""
    return SlotsMemory(*joined(spec, 2 * -(-num_tokens // BLOCK_TOKENS), device), num_tokens)


def paged(connector: Callable[[], GPUConnector]) -> ConnectorHarness:
    """The harness of `paged`."""
    return SlotsHarness(connector(), slots)


def paged_cuda(connector: Callable[[], GPUConnector]) -> ConnectorHarness:
    """The harness of `paged_cuda`, on the first device."""
    found = kernels()
    device = "cuda" if found is None else found.device_type
    return SlotsHarness(connector(), lambda spec, num_tokens: slots(spec, num_tokens, device))


class PairsMemory(EngineMemory):
    """For `nested_tuple`: the tokens are the middle of longer tensors, `[tokens, heads, head size]` each."""

    def __init__(self, spec: KVSpec, num_tokens: int) -> None:
        self._heads = (spec.num_kv_heads, spec.head_size)
        shape = (spec.kv_planes, spec.num_layers, num_tokens + 2 * _MARGIN, *self._heads)
        self._all = torch.full(shape, 3).to(spec.torch_dtype)
        self._middle = self._all[:, :, _MARGIN:-_MARGIN]

    @property
    def where(self) -> Mapping[str, Any]:
        return {"kvcaches": tuple(tuple(layer) for layer in self._middle.transpose(0, 1))}

    def kv(self) -> torch.Tensor:
        return self._middle.flatten(-2).clone()

    def set_kv(self, kv: torch.Tensor) -> None:
        self._middle.copy_(kv.unflatten(-1, self._heads))

    def surroundings(self) -> bytes:
        beside = torch.cat([self._all[:, :, :_MARGIN], self._all[:, :, -_MARGIN:]], dim=2)
        return beside.contiguous().view(torch.uint8).numpy().tobytes()


def nested_tuple(connector: Callable[[], GPUConnector]) -> ConnectorHarness:
    """The harness of `nested_tuple`."""
    return ConnectorHarness(connector(), PairsMemory)
