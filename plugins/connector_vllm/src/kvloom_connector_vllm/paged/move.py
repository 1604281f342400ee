"""One move of KV between pages and chunks, and how torch does it: the reference, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvloom import Chunk, KVSpec, Segment
from kvloom.device import synchronize

from .layout import PagedLayout
from .slots import Slots
from .table import PageTable

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element: what torch can index, whatever the dtype of the KV is."""


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of slots to or from chunks."""

    pages: PageTable
    slots: Slots
    """The slots of the tokens of all chunks, one chunk after another."""
    chunks: Sequence[torch.Tensor]
    """`[planes, layers, tokens, hidden]` each, the last two contiguous; as many layers as `pages` has."""
    to_pages: bool


def tensor_of(segment: Segment, chunk: Chunk, spec: KVSpec, num_layers: int) -> torch.Tensor:
    """The KV of a chunk. ValueError unless it is that of the segment, in `num_layers` layers."""
    tensor, tokens = chunk.tensor, segment.end - segment.start
    expected = (spec.kv_planes, num_layers, tokens, spec.hidden_dim)
    if tuple(tensor.shape) != expected or tensor.dtype != spec.torch_dtype:
        raise ValueError(
            f"chunk: of tokens {segment.start} to {segment.end}, expected {list(expected)} of {spec.torch_dtype}, "
            f"got {list(tensor.shape)} of {tensor.dtype}"
        )
    if not tensor[0, 0].is_contiguous():
        raise ValueError(f"chunk: of tokens {segment.start} to {segment.end}, strides {tensor.stride()} within a layer")
    return tensor


def by_torch(move: Move, layout: PagedLayout) -> None:
    """Copy; done on return. layout: the tensors of `move.pages`."""
    device, at = move.pages.device, 0
    for chunk in move.chunks:
        tokens = chunk.shape[2]
        slots = torch.from_numpy(move.slots[at : at + tokens])
        at += tokens
        kept = slots >= 0
        if not kept.any():
            continue
        whole = bool(kept.all())
        places = (slots if whole else slots[kept]).to(device)
        near = chunk if chunk.device == device else torch.empty_like(chunk, device=device)
        if move.to_pages and near is not chunk:
            near.copy_(chunk)
        _exchange(move, layout, near, places, None if whole else kept.to(device))
        if not move.to_pages and near is not chunk:
            chunk.copy_(near)
    synchronize(device)


def _exchange(
    move: Move, layout: PagedLayout, chunk: torch.Tensor, slots: torch.Tensor, kept: torch.Tensor | None
) -> None:
    """Between the slots and the tokens of a chunk on the device of the pages; `kept`: which of them, if not all."""
    bits, size = _BITS[chunk.element_size()], move.pages.block_size
    blocks, offsets = slots // size, slots % size
    for plane, layers in enumerate(layout.planes):
        for layer, view in enumerate(layers):
            pages = view.view(bits)
            rows = chunk[plane, layer].view(bits).view(-1, *view.shape[2:])
            if move.to_pages:
                pages[blocks, offsets] = rows if kept is None else rows[kept]
            elif kept is None:
                rows.copy_(pages[blocks, offsets])
            else:
                rows[kept] = pages[blocks, offsets]
