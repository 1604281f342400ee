"""vLLM's KV caches as rows of pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..identity import Identity


def pages_of(kv_caches: Mapping[str, torch.Tensor], identity: Identity, num_blocks: int) -> list[torch.Tensor]:
    """A view `[num_blocks, page_elements]` of each layer's cache, of all parts, in the identity's order of layers.

    kv_caches: as vLLM registers them, `[blocks, heads, tokens, content]` in any order of memory in which a block's KV
    is in one piece; the kernels' blocks may be smaller than the manager's. ValueError, naming the layer, otherwise.
    """
    missing = [name for name in identity.layer_names if name not in kv_caches]
    if missing:
        raise ValueError(f"layer {missing[0]}: vLLM registered no KV cache for it")
    elements, dtype = identity.page_elements, identity.spec.torch_dtype
    pages = _states if identity.state else _pages
    return [pages(name, kv_caches[name], num_blocks, elements, dtype) for name in identity.layer_names]


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


def _states(name: str, cache: torch.Tensor, num_blocks: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes of states as elements of a dtype, the last of which may be padding; another page's is never reached."""
    size, step = cache[0].numel(), cache.stride(0)
    pages, wanted = cache.shape[0], elements * dtype.itemsize
    if (
        cache.element_size() != 1
        or pages != num_blocks
        or not cache[0].is_contiguous()
        or not wanted - dtype.itemsize < size <= wanted <= step
    ):
        raise ValueError(
            f"layer {name}: its states are {list(cache.shape)} of {cache.dtype} with strides {cache.stride()}, not "
            f"{num_blocks} blocks of {wanted} bytes in one piece"
        )
    return torch.as_strided(cache, (num_blocks, wanted), (step, 1), cache.storage_offset()).view(dtype)


_DIGIT = 128
"""Elements are numbered in digits that every dtype holds exactly."""


def order_of(write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], identity: Identity) -> torch.Tensor:
    """int64 `[page_elements]`: where `write` puts each element of a block's K and V, of all parts.

    write: takes K and V `[tokens, heads, size]` of one block, and gives its page, flat. The order is (plane, token,
    head, element of the head). ValueError if something is lost or changed on the way: then only the engine can read it.
    """
    spec, tokens = identity.spec, identity.geometry.block_tokens
    shape = (2, tokens, identity.page_heads, spec.head_size)
    numbers = torch.arange(identity.page_elements).view(shape)
    found, weight = torch.zeros(identity.page_elements, dtype=torch.int64), 1
    while weight < numbers.numel():
        digits = (numbers // weight % _DIGIT).to(spec.torch_dtype)
        page = write(digits[0].contiguous(), digits[1].contiguous())
        if page.numel() != numbers.numel() or not torch.equal(page.long().to(page.dtype), page):
            raise ValueError(
                "connector: the engine does not keep K and V as they are; write vllm, which keeps its pages"
            )
        found += page.long() * weight
        weight *= _DIGIT
    order = torch.argsort(found)
    if not torch.equal(found[order], numbers.flatten()):
        raise ValueError(
            "connector: K and V cannot be separated in the engine's pages; write vllm, which keeps them whole"
        )
    return order


def orders_of_parts(order: torch.Tensor, identity: Identity) -> list[torch.Tensor]:
    """int64 `[page_elements]` of each part: its heads' share of the order of a whole page."""
    shape = (2, identity.geometry.block_tokens, identity.shards, -1)
    return [part.reshape(-1) for part in order.view(shape).unbind(2)]
