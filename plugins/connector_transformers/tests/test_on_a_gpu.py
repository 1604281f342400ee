"""A model on a GPU starts from what it would have computed. `make test-gpu` runs it, where there is transformers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, PreTrainedModel

from kvloom import Registry
from kvloom_connector_transformers import cached

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_second_call_starts_from_stored_kv_and_is_exact(
    make: Callable[..., PreTrainedModel], family: str, dtype: torch.dtype, config: dict[str, Any],
    prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    names, discover = ("kvloom.builtin", "kvloom_connector_transformers"), Registry.discover
    found = [EntryPoint(name, name, "kvloom.v1") for name in names]
    monkeypatch.setattr(Registry, "discover", lambda **settings: discover(entry_points=found))
    plain = make(family, dtype=dtype).cuda()
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    first, tail = prompt.cuda(), torch.arange(3, 33, device="cuda")[None]
    longer = torch.cat([first, tail], 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with cached(plain, config) as model, torch.cuda.stream(stream):
        model.generate(first, **options)
        warm = model.generate(longer, **options)
        assert model.last is not None and model.last.hit_tokens == 64
    torch.cuda.synchronize()
    cache = DynamicCache(config=plain.config)
    with torch.no_grad():
        plain(input_ids=first, past_key_values=cache, use_cache=True)
    cache.crop(64 - first.shape[1])
    split = plain.generate(longer, past_key_values=cache, **options)
    assert torch.equal(warm.sequences, split.sequences)
    assert all(torch.equal(a, b) for a, b in zip(warm.logits, split.logits, strict=True))
