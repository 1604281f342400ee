"""`type: vllm_blob`: whole blocks of an engine's paged KV as chunks of K and V."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvloom import MemoryFormat

from .blocks import Chosen, Pages, VLLMConnector
from .settings import VLLMBlobConfig, VLLMConfig
from .slots import Slots
from .table import PageTable


class VLLMBlobConnector(VLLMConnector):
    """K and V of whole blocks (KV_BLOB), for engines whose pages are known inside out: codecs can work on it.

    `where`, besides that of `vllm`: `order`, int64 `[page_elements]` on the pages' device: where in a page the element
    is that comes next in the order (plane, token, head, element of the head); each place once. If the geometry has
    `surrounding_elements`, these are some of a page's heads, and the others are left alone.
    """

    type = "vllm_blob"
    format = MemoryFormat.KV_BLOB
    Config = VLLMBlobConfig
    _words = VLLMConnector._words | {"order"}

    def __init__(self, config: VLLMConfig, spec: Any = None) -> None:
        super().__init__(config, spec)
        self._known: _Order | None = None

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        assert self.spec is not None
        self._whole_blocks(num_tokens)
        return self.spec.blob_shape(num_tokens)

    def check(self, where: Mapping[str, Any], num_tokens: int) -> None:
        super().check(where, num_tokens)
        order, elements = where.get("order"), self._geometry.page_elements
        if not isinstance(order, torch.Tensor) or order.dtype != torch.int64 or tuple(order.shape) != (elements,):
            raise ValueError(f"order: expected an int64 tensor [{elements}]")
        if not self._about(order).each_once:
            raise ValueError("order: expected places of a page, none of them twice")

    def _alike(self, its: Pages, tensors: Sequence[torch.Tensor], *, order: torch.Tensor) -> bool:  # type: ignore[override]
        return super()._alike(its, tensors) and self._about(order).strides is not None

    def _in_one_piece(self, tensor: torch.Tensor) -> bool:
        return tensor[0, 0].is_contiguous()

    def _table(  # type: ignore[override]
        self, its: Pages, chosen: Chosen, *, order: torch.Tensor
    ) -> tuple[PageTable, Slots, Slots]:
        """The tokens of all layers, by the strides of a page."""
        assert self.spec is not None
        strides, size, step = self._about(order).strides, its.dtype.itemsize, self._geometry.block_tokens
        assert strides is not None
        ids = chosen.ids
        slots = np.where(ids[:, None] < 0, -1, ids[:, None] * step + np.arange(step)).reshape(-1)
        first, plane, token, head = (number * size for number in strides)
        heads, head_bytes = self.spec.num_kv_heads, self.spec.head_size * size
        if head == head_bytes:  # they lie side by side
            heads, head_bytes = 1, heads * head_bytes
        planes, layers = self.spec.kv_planes, len(its.rows)
        rows = np.tile(its.rows, (planes, 1))
        rows[:, 0] += first + np.repeat(np.arange(planes) * plane, layers)
        rows[:, 2], rows[:, 3] = token, head
        table = PageTable(rows, planes, layers, heads, head_bytes, its.count, step, its.device)
        return table, slots, chosen.counts * step

    def _by_plane(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _layer(self, tensor: torch.Tensor, layer: int) -> torch.Tensor:
        return tensor[:, layer : layer + 1]

    def _take(  # type: ignore[override]
        self, view: torch.Tensor, ids: torch.Tensor, into: torch.Tensor, layer: int, *, order: torch.Tensor
    ) -> None:
        planes, _, _, hidden = into.shape
        rows = view.index_select(0, ids).index_select(1, order)
        ordered = rows.view(len(ids), planes, self._geometry.block_tokens, hidden).transpose(0, 1)
        into[:, layer].view(ordered.shape).copy_(ordered)

    def _rows(self, chunk: torch.Tensor, layer: int) -> torch.Tensor:
        planes, _, tokens, hidden = chunk.shape
        step = self._geometry.block_tokens
        return chunk[:, layer].view(planes, tokens // step, step, hidden).transpose(0, 1).reshape(tokens // step, -1)

    def _put(  # type: ignore[override]
        self, view: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, *, order: torch.Tensor
    ) -> None:
        if self._geometry.surrounding_elements:
            view.index_put_((ids[:, None], order), rows)
        else:
            view.index_copy_(0, ids, rows.index_select(1, self._about(order).inverse))

    def _about(self, order: torch.Tensor) -> _Order:
        """The order as numbers, worked out once."""
        version = 0 if order.is_inference() else order._version
        known = self._known
        if known is None or known.order is not order or known.version != version:
            assert self.spec is not None
            places, inverse = torch.sort(order)
            most = self._geometry.page_elements + self._geometry.surrounding_elements
            # As many different ones as a whole page has are all of them.
            each_once = bool(places[0] >= 0) and bool(places[-1] < most) and bool((places[1:] > places[:-1]).all())
            shape = (self.spec.kv_planes, self._geometry.block_tokens, self.spec.num_kv_heads, self.spec.head_size)
            known = self._known = _Order(
                order, version, each_once, inverse, _strides(order.cpu().numpy().reshape(shape)) if each_once else None
            )  # fmt: skip
        return known


class _Order(NamedTuple):
    """An order of elements in a page."""

    order: torch.Tensor
    version: int
    each_once: bool
    inverse: torch.Tensor
    """The place in the order of each element of a page, if it is a whole one."""
    strides: tuple[int, int, int, int] | None
    """The first place, and how far planes, tokens and heads are apart, in elements; None if they are not so placed, or
    the elements of a head do not follow each other."""


def _strides(places: np.ndarray[Any, Any]) -> tuple[int, int, int, int] | None:
    """places: `[planes, tokens, heads, elements]`."""
    first = int(places[0, 0, 0, 0])
    plane, token, head = (
        int(places[tuple(int(axis == which) for axis in range(4))]) - first if places.shape[which] > 1 else 0
        for which in range(3)
    )
    planes, tokens, heads, elements = np.ogrid[tuple(map(slice, places.shape))]
    same = (places == first + planes * plane + tokens * token + heads * head + elements).all()
    return (first, plane, token, head) if same else None
