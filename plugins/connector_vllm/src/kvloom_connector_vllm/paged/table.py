"""An engine's pages as numbers: what moves of KV begin with, without a hold on the engine's tensors."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvloom import KVSpec

from .layout import PagedLayout
from .settings import LayoutName

_MOST = 1024
"""Tables that are remembered. An engine has one, and one for each layer."""


@dataclass(frozen=True, slots=True)
class PageTable:
    """Addresses of the layers' planes, and the shape of a slot."""

    rows: np.ndarray[Any, Any]
    """int64 `[planes x layers, 4]`: address, strides of block, slot and head in bytes."""
    planes: int
    layers: int
    heads: int
    """1 where heads lie side by side: then `head_bytes` is all of them, and `rows` say so."""
    head_bytes: int
    num_blocks: int
    block_size: int
    device: torch.device

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @classmethod
    def of(cls, layout: PagedLayout) -> PageTable:
        views = [view for layers in layout.planes for view in layers]
        heads, head_bytes = views[0].shape[2], views[0].shape[3] * views[0].element_size()
        rows = np.array([_row(view) for view in views], dtype=np.int64)
        if heads > 1 and (rows[:, 3] == head_bytes).all():
            heads, head_bytes = 1, heads * head_bytes
            rows[:, 3] = head_bytes
        return cls(
            rows, len(layout.planes), len(layout.planes[0]), heads, head_bytes, layout.num_blocks,
            layout.block_size, layout.device,
        )  # fmt: skip


def _row(view: torch.Tensor) -> tuple[int, ...]:
    size, (block, slot, head, _) = view.element_size(), view.stride()
    return view.data_ptr(), block * size, slot * size, head * size


class PageTables:
    """The tables of a connector. Those of tensors of the same addresses, shapes, strides, dtypes and devices are the
    same, whichever tensors they are, so that they are worked out once."""

    def __init__(self, spec: KVSpec, name: LayoutName) -> None:
        self._spec, self._name = spec, name
        self._known: dict[Hashable, PageTable] = {}

    def get(self, kvcaches: Any, layer: int | None = None) -> PageTable:
        """The table of all layers, or of one. ValueError as in `PagedLayout.of`."""
        key = _signature(kvcaches, layer)
        if key in self._known:
            return self._known[key]
        table = PageTable.of(self.layout(kvcaches, layer))
        if len(self._known) >= _MOST:
            self._known.clear()
        if key is not None:
            self._known[key] = table
        return table

    def layout(self, kvcaches: Any, layer: int | None = None) -> PagedLayout:
        """The tensors themselves, for this call."""
        return PagedLayout.of(kvcaches, self._spec, self._name, layer=layer)


def _signature(kvcaches: Any, layer: int | None) -> Hashable | None:
    """Everything that a table depends on; None if that is unknown."""
    try:
        if isinstance(kvcaches, torch.Tensor):
            return layer, _about(kvcaches)
        some = kvcaches if layer is None else [kvcaches[layer]]
        return (
            layer,
            len(kvcaches),
            tuple((_about(one),) if isinstance(one, torch.Tensor) else tuple(map(_about, one)) for one in some),
        )
    except (TypeError, AttributeError, LookupError):
        return None


def _about(tensor: torch.Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
