"""Connectors that accept indices of no memory, or memory of another dtype."""

from __future__ import annotations

from typing import Any

import torch

from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.connector import SlotsConnector


class LooksForTheLargestSlot(Mutant, SlotsConnector):
    """Below 0 there is nothing."""

    breaks = "C07"

    def _check(self, pool: Any, slots: Any, num_tokens: int) -> None:
        super()._check(pool, slots.clamp(min=0) if isinstance(slots, torch.Tensor) else slots, num_tokens)


class LooksAtTheFirstSlot(Mutant, SlotsConnector):
    """Checks only the first slot."""

    breaks = "C07"

    def _check(self, pool: Any, slots: Any, num_tokens: int) -> None:
        if isinstance(slots, torch.Tensor) and slots.dim() == 1 and slots.numel():
            slots = slots[:1].expand(slots.numel())
        super()._check(pool, slots, num_tokens)


class LooksAtTheSizeOfElements(Mutant, SlotsConnector):
    """Two bytes are two bytes."""

    breaks = "C07"

    def _check(self, pool: Any, slots: Any, num_tokens: int) -> None:
        assert self.spec is not None
        if isinstance(pool, torch.Tensor) and pool.element_size() == self.spec.torch_dtype.itemsize:
            pool = pool.view(self.spec.torch_dtype)
        super()._check(pool, slots, num_tokens)
