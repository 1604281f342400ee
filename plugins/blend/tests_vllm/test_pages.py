"""KV of a DynamicCache, in vLLM's pages, element by element."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import DynamicCache

from kvloom import KVSpec
from kvloom_blend.vllm.twin import Pages
from kvloom_connector_vllm.paged.settings import Geometry


@pytest.mark.parametrize("seed", range(30))
def test_each_element_is_where_the_order_says(seed: int) -> None:
    pick = random.Random(seed)
    torch.manual_seed(seed)
    layers, heads, size, block = pick.randint(1, 3), pick.randint(1, 3), pick.choice([2, 4]), pick.choice([1, 4, 16])
    length = pick.randint(1, 40)
    count = pick.randint(max(1, length - 1), length)  # all but the last token, or all
    elements, num_blocks = 2 * block * heads * size, 50
    order = torch.randperm(elements)
    views = [torch.full((num_blocks, elements), -9.0) for _ in range(layers)]
    spec = KVSpec(
        model="m", revision="r", rope={}, num_layers=layers, num_kv_heads=heads, head_size=size, dtype="float32"
    )
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(torch.randn(1, heads, length, size), torch.randn(1, heads, length, size), layer)
    blocks = pick.sample(range(num_blocks), -(-count // block) + pick.randint(0, 2))
    Pages(views, order, spec, Geometry(layers=layers, block_tokens=block, page_elements=elements)).write(
        cache, blocks, count
    )
    used = blocks[: -(-count // block)]
    for layer, view in enumerate(views):
        ordered = view[used][:, order].view(len(used), 2, block, heads, size)
        for plane, states in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
            got = ordered[:, plane].reshape(-1, heads, size)
            assert torch.equal(got[:count], states[0, :, :count].transpose(0, 1))
            assert not got[count:].any(), "what is behind them is zero, not what was there before"
        untouched = [number for number in range(num_blocks) if number not in used]
        assert (view[untouched] == -9.0).all(), "other requests' blocks"


def test_too_few_blocks_are_an_error() -> None:
    spec = KVSpec(model="m", revision="r", rope={}, num_layers=1, num_kv_heads=1, head_size=2, dtype="float32")
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 9, 2), torch.zeros(1, 1, 9, 2), 0)
    pages = Pages([torch.zeros(4, 16)], torch.arange(16), spec, Geometry(layers=1, block_tokens=4, page_elements=16))
    with pytest.raises(ValueError, match="blocks: 2 of 4 tokens for 9"):
        pages.write(cache, [1, 2], 9)
