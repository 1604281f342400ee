"""An engine's memory for the connector to work on, into which its tests can look."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvloom import GPUConnector, KVSpec
from kvloom_testkit import ConnectorHarness, EngineMemory


class SlotsMemory(EngineMemory):
    """A pool of twice as many slots as a request needs; those of the request are anywhere in it."""

    def __init__(self, spec: KVSpec, num_tokens: int) -> None:
        order = torch.randperm(2 * num_tokens, generator=torch.Generator().manual_seed(num_tokens))
        self.slots, self._others = order[:num_tokens].clone(), order[num_tokens:]
        nbytes = 2 * num_tokens * spec.hidden_dim * spec.torch_dtype.itemsize
        shape = (spec.kv_planes, spec.num_layers, nbytes)
        bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
        self.pool = bits.view(spec.torch_dtype).view(*shape[:2], 2 * num_tokens, spec.hidden_dim)

    @property
    def where(self) -> Mapping[str, Any]:
        return {"pool": self.pool, "slots": self.slots}

    def kv(self) -> torch.Tensor:
        return self.pool[:, :, self.slots].clone()

    def set_kv(self, kv: torch.Tensor) -> None:
        self.pool[:, :, self.slots] = kv

    def move(self) -> bool:
        # As an engine does that has one tensor for the slots of whatever request comes next.
        taken, free = self.slots.clone(), self._others
        self.slots.copy_(free[: len(taken)])
        self._others = torch.cat([taken, free[len(taken) :]])
        return True

    def surroundings(self) -> bytes:
        others = self.pool[:, :, self._others].contiguous().view(torch.uint8)
        return others.numpy().tobytes() + self.slots.numpy().tobytes()


def harness(component: Callable[[], GPUConnector]) -> ConnectorHarness:
    """The kit's harness: the connector, and memory as its engine has it."""
    return ConnectorHarness(component(), SlotsMemory)
