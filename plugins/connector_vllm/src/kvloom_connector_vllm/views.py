"""vLLM's KV caches as rows of pages."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .identity import Identity


def pages_of(kv_caches: Mapping[str, torch.Tensor], identity: Identity, num_blocks: int) -> list[torch.Tensor]:
    """A view `[num_blocks, page_elements]` of each layer's cache, in the identity's order of layers.

    kv_caches: as vLLM registers them, `[blocks, heads, tokens, content]` in any order of memory in which a block's KV
    is in one piece; the kernels' blocks may be smaller than the manager's. ValueError, naming the layer, otherwise.
    """
    missing = [name for name in identity.layer_names if name not in kv_caches]
    if missing:
        raise ValueError(f"layer {missing[0]}: vLLM registered no KV cache for it")
    elements, dtype = identity.geometry.page_elements, identity.spec.torch_dtype
    return [_pages(name, kv_caches[name], num_blocks, elements, dtype) for name in identity.layer_names]


def _pages(name: str, cache: torch.Tensor, num_blocks: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    if cache.element_size() != dtype.itemsize or cache.shape[0] % num_blocks:
        raise ValueError(
            f"layer {name}: its cache is {list(cache.shape)} of {cache.dtype}, not {num_blocks} blocks of {dtype}"
        )
    if cache.shape[0] != num_blocks:
        cache = cache.unflatten(0, (num_blocks, -1))
    inner = sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True))
    expected = 1
    for stride, size in inner:
        if size != 1 and stride != expected:
            raise ValueError(
                f"layer {name}: a block's KV is not in one piece (shape {list(cache.shape)}, strides {cache.stride()})"
            )
        expected *= size
    if expected != elements:
        raise ValueError(f"layer {name}: a block has {expected} elements, not the {elements} of its specification")
    rows = torch.as_strided(cache, (num_blocks, elements), (cache.stride(0), 1), cache.storage_offset())
    return rows if rows.dtype == dtype else rows.view(dtype)
