"""Engines' pages in memory: tensors of any of their layouts as views of one form, told apart by strides alone.

vLLM 0.32 has a view `[B, H, N, C]` of each layer (blocks, heads, tokens of a block, content), K and V side by side in
C, in one of six physical orders. Versions before it, and other engines, have `[B, N, H, C]` or `[B, H, N, C]` of K and
of V, in two tensors or in one with an axis of 2 in front of the blocks or behind them. MLA keeps one latent vector of
each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from kvloom import KVSpec

from .settings import LayoutName

ORDERS = tuple(name for name in get_args(LayoutName) if name.isupper())


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """The places of K and V by slot. A slot is a token's place: block times block size, plus the place in the block."""

    planes: tuple[tuple[torch.Tensor, ...], ...]
    """For each plane (K and V, or one) and each layer: a view `[blocks, block size, heads, head size]`."""

    @property
    def num_blocks(self) -> int:
        return self.planes[0][0].shape[0]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.planes[0][0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.planes[0][0].device

    @classmethod
    def of(cls, kvcaches: Any, spec: KVSpec, name: LayoutName = "auto", *, layer: int | None = None) -> PagedLayout:
        """The layout of an engine's tensors; of one layer only, if `layer` is given. Nothing is copied.

        kvcaches: for each layer a pair (K, V), or one tensor; or one tensor for all layers, if the layout is one of
        vLLM's. Raises ValueError for KV of another model, or an ambiguous layout.
        """
        if kvcaches is None:
            raise ValueError("kvcaches: missing; pass kvcaches=, for each layer a pair (K, V) or one tensor")
        layers = _layers_of(kvcaches, spec, name)
        if len(layers) != spec.num_layers:
            raise ValueError(f"kvcaches: {len(layers)} layers, the model has {spec.num_layers}")
        numbers = range(spec.num_layers) if layer is None else (layer,)
        views = [_planes_of(layers[number], spec, name, f"kvcaches[{number}]") for number in numbers]
        first = views[0][0]
        for number, planes in zip(numbers, views, strict=True):
            for view in planes:
                if view.shape != first.shape or view.device != first.device:
                    raise ValueError(
                        f"kvcaches[{number}]: blocks of {_blocks(view)}, others of {_blocks(first)}: one slot is to "
                        "mean one place in all layers"
                    )
        return cls(tuple(zip(*views, strict=True)))


def _layers_of(kvcaches: Any, spec: KVSpec, name: LayoutName) -> Sequence[Any]:
    """The tensors of each layer."""
    if isinstance(kvcaches, list | tuple):
        return kvcaches
    if not isinstance(kvcaches, torch.Tensor):
        raise ValueError(f"kvcaches: expected a list of layers, got {type(kvcaches).__name__}")
    if name not in ORDERS:
        raise ValueError(f"kvcaches: one tensor for all layers; set layout to its order, one of {', '.join(ORDERS)}")
    if kvcaches.dim() == 6 and spec.kv_planes == 2 and kvcaches.shape[0] == 2:
        return list(zip(*(_layers_of(plane, spec, name) for plane in kvcaches), strict=True))
    if kvcaches.dim() != 5:
        raise ValueError(f"kvcaches: expected the five dimensions of {name}, got {list(kvcaches.shape)}")
    return kvcaches.permute([name.index(axis) for axis in "LBHNC"]).unbind()


def _planes_of(layer: Any, spec: KVSpec, name: LayoutName, what: str) -> list[torch.Tensor]:
    """`[blocks, block size, heads, head size]` of each plane of a layer."""
    tensors = [layer] if isinstance(layer, torch.Tensor) else layer
    if not isinstance(tensors, list | tuple) or not all(isinstance(each, torch.Tensor) for each in tensors):
        raise ValueError(f"{what}: expected a tensor, or a pair of them, got {type(layer).__name__}")
    for tensor in tensors:
        if tensor.dtype != spec.torch_dtype:
            raise ValueError(f"{what}: {tensor.dtype}, not {spec.torch_dtype}")
    if spec.kv_planes == 2 and len(tensors) == 1:
        tensors = _split(tensors[0], spec, what)
    if len(tensors) != spec.kv_planes:
        raise ValueError(f"{what}: expected {spec.kv_planes} tensors, one for each plane of KV, got {len(tensors)}")
    return [_blocks_first(tensor, spec, name, what) for tensor in tensors]


def _split(joined: torch.Tensor, spec: KVSpec, what: str) -> Sequence[torch.Tensor]:
    """K and V of a tensor that holds both."""
    if joined.dim() == 4 and joined.shape[-1] == 2 * spec.head_size:
        return joined.split(spec.head_size, -1)
    axes = [axis for axis in (0, 1) if joined.dim() == 5 and joined.shape[axis] == 2]
    if len(axes) == 2:
        raise ValueError(
            f"{what}: {list(joined.shape)} may be K and V of two blocks in either order; pass a pair (K, V)"
        )
    if not axes:
        raise ValueError(
            f"{what}: {list(joined.shape)} is not K and V of heads of {spec.head_size}: expected [2, blocks, ...], "
            f"[blocks, 2, ...] or a content of {2 * spec.head_size}"
        )
    return joined.unbind(axes[0])


def _blocks_first(tensor: torch.Tensor, spec: KVSpec, name: LayoutName, what: str) -> torch.Tensor:
    """A view of one plane, `[blocks, block size, heads, head size]`."""
    shape = list(tensor.shape)
    if tensor.dim() == 3 and spec.num_kv_heads == 1:  # MLA, which has no axis for a single head
        tensor = tensor.unsqueeze(2 if name in ("auto", "nhd") else 1)
    if tensor.dim() != 4 or tensor.shape[-1] != spec.head_size:
        raise ValueError(f"{what}: {shape} is not [blocks, tokens, heads, {spec.head_size}] in any order of the middle")
    heads_at = _heads_at(tensor, spec, name, what)
    if tensor.shape[heads_at] != spec.num_kv_heads:
        raise ValueError(f"{what}: {shape} has {tensor.shape[heads_at]} heads by {name}, the model {spec.num_kv_heads}")
    if name in ORDERS:
        _check_order(tensor, name, what)
    view = tensor.transpose(1, 2) if heads_at == 1 else tensor
    if spec.head_size > 1 and view.stride(3) != 1:
        raise ValueError(f"{what}: the content of a head is not contiguous, but has a stride of {view.stride(3)}")
    if 0 in view.shape:
        raise ValueError(f"{what}: {shape} has room for nothing")
    return view


def _heads_at(tensor: torch.Tensor, spec: KVSpec, name: LayoutName, what: str) -> int:
    if name != "auto":
        return 2 if name == "nhd" else 1
    fits = [axis for axis in (1, 2) if tensor.shape[axis] == spec.num_kv_heads]
    if len(fits) == 2 and spec.num_kv_heads > 1:
        raise ValueError(
            f"{what}: of {list(tensor.shape)}, {fits[0]} and {fits[1]} may both be heads; set layout to nhd or hnd"
        )
    return fits[-1] if fits else 2


def _check_order(tensor: torch.Tensor, name: LayoutName, what: str) -> None:
    """Check that the strides of `[B, H, N, C]` decrease in the order of the layout's name."""
    axes = [axis for axis in name if axis in "BHN"]
    sizes = dict(zip("BHN", tensor.shape, strict=False))
    strides = dict(zip("BHN", tensor.stride(), strict=False))
    found = [strides[axis] for axis in axes if sizes[axis] > 1]
    if found != sorted(found, reverse=True):
        raise ValueError(f"{what}: strides {tensor.stride()} of [B, H, N, C] are not those of {name}")


def _blocks(view: torch.Tensor) -> str:
    return f"{view.shape[0]} x {view.shape[1]} tokens on {view.device}"
