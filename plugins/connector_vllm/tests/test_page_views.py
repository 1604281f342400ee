"""vLLM's tensors as pages: each is all of a block and nothing else, whatever the order of their dimensions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm_fakes import BLOCK, grouped, kv_cache_config, layer_spec, state_spec, vllm_config

from kvloom_connector_vllm.identity import identify, identify_groups
from kvloom_connector_vllm.paged.views import order_of, pages_of

ORDERS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "BLHNC": (1, 0, 2, 3, 4), "BLNHC": (1, 0, 3, 2, 4)}


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("order", [*ORDERS, "LHBNC"])
def test_a_page_is_all_of_a_block_and_nothing_else(model: Path, order: str, split: int) -> None:
    """split: the kernels' blocks are smaller than the manager's."""
    blocks, layers, heads, content = 6, 3, 2, 16
    axes = ORDERS.get(order, (0, 2, 1, 3, 4))
    shape = (layers, blocks * split, heads, BLOCK // split, content)
    raw = torch.arange(layers * blocks * heads * BLOCK * content, dtype=torch.float32)
    logical = raw.view([shape[axis] for axis in axes]).permute([axes.index(axis) for axis in range(5)])
    known = kv_cache_config(layers, num_blocks=blocks)
    one = identify(vllm_config(str(model)), known, rank=0, about={})
    caches = dict(zip(one.layer_names, logical, strict=True))
    if order == "LHBNC" or (split > 1 and order.startswith("B")):
        with pytest.raises(ValueError, match="not in one piece"):
            pages_of(caches, one, blocks)
        return
    pages = pages_of(caches, one, blocks)
    for layer, view in enumerate(pages):
        assert view.shape == (blocks, heads * BLOCK * content) and view.stride(1) == 1
        for block in range(blocks):
            expected = logical[layer, block * split : (block + 1) * split]
            assert sorted(view[block].tolist()) == sorted(expected.flatten().tolist())
            assert view[block].data_ptr() >= raw.data_ptr()
    pages[1][2] = -1
    assert (logical[1, 2 * split : 3 * split] == -1).all() and int((raw == -1).sum()) == heads * BLOCK * content


def test_a_cache_of_another_shape_is_refused(model: Path) -> None:
    one = identify(vllm_config(str(model)), kv_cache_config(), rank=0, about={})
    good = {name: torch.zeros(6, 2, BLOCK, 16) for name in one.layer_names}
    assert len(pages_of(good, one, 6)) == 3
    for wrong, said in ((torch.zeros(6, 2, BLOCK, 8), "64 elements"), (torch.zeros(6, 2, BLOCK, 16).half(), "float16")):
        with pytest.raises(ValueError, match=said):
            pages_of({**good, one.layer_names[1]: wrong}, one, 6)
    with pytest.raises(ValueError, match="registered no KV cache"):
        pages_of({one.layer_names[0]: good[one.layer_names[0]]}, one, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_order_in_a_page_is_found_by_writing(model: Path, dtype: torch.dtype) -> None:
    known = kv_cache_config(spec=layer_spec(dtype=dtype, page_size_bytes=2 * BLOCK * 16 * dtype.itemsize))
    one = identify(vllm_config(str(model)), known, rank=0, about={}, pages=False)
    elements = one.geometry.page_elements
    secret = torch.randperm(elements, generator=torch.Generator().manual_seed(3))

    def write(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        page = torch.empty(elements, dtype=dtype)
        page[secret] = torch.stack([keys, values]).flatten()
        return page

    assert torch.equal(order_of(write, one), secret)
    with pytest.raises(ValueError, match="cannot be separated"):
        order_of(lambda keys, values: torch.zeros(elements, dtype=dtype), one)
    with pytest.raises(ValueError, match="as they are"):
        order_of(lambda keys, values: write(keys, values) / 2, one)


def test_states_are_read_in_the_pages_of_other_layers(model: Path) -> None:
    whole = grouped(layer_spec(), state_spec())
    one = identify_groups(vllm_config(str(model)), whole, rank=0, about=lambda layer: {})[1]
    memory, page, blocks = torch.arange(6 * 128).to(torch.int8), 128, 6

    def caches(count: int = blocks, size: int = 62, step: int = page, more: int = 0) -> dict[str, torch.Tensor]:
        return {name: memory.as_strided((count, 1, 1, size), (step, size, size, 1), more) for name in one.layer_names}

    for pages in pages_of(caches(), one, blocks):
        assert pages.dtype == torch.float32 and pages.shape == (6, 16) and pages.data_ptr() == memory.data_ptr()
        assert torch.equal(pages[5].view(torch.int8)[:62], memory[5 * page : 5 * page + 62])
    for wrong in (caches(5), caches(size=60), caches(size=65), caches(step=62, size=62), caches(2 * blocks, step=64)):
        with pytest.raises(ValueError, match=r"layers\.2: its states are"):
            pages_of(wrong, one, blocks)
