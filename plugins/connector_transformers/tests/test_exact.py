"""Restored KV is the KV that was stored: logits equal those of the same split without kvloom, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from kvloom import Engine
from kvloom_connector_transformers import RestoredKV, set_length, spec_of
from kvloom_connector_transformers.plain import plain_kv

PREFIX = 64
"""Tokens that are restored: the four whole chunks of the prompt."""


@torch.no_grad()
def run(model: PreTrainedModel, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
    return model(input_ids=tokens, past_key_values=cache, use_cache=True).logits


def fill(model: PreTrainedModel, tokens: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    run(model, tokens, cache)
    return cache


def static(model: PreTrainedModel, rows: int = 1) -> StaticCache:
    spec = spec_of(model)
    cache = StaticCache(config=model.config, max_cache_len=96)
    cache.early_initialization(rows, spec.num_kv_heads, spec.head_size, spec.torch_dtype, model.device)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_dynamic_cache(
    make: Callable[..., PreTrainedModel], family: str, dtype: torch.dtype, config: dict[str, Any], prompt: torch.Tensor
) -> None:
    model = make(family, dtype=dtype)
    with Engine.open(config, spec_of(model)) as engine:
        engine.store(prompt[0], cache=fill(model, prompt))
        restored = RestoredKV.allocate(engine.spec, PREFIX, key_size=plain_kv(model).key_size)
        mask = engine.retrieve(prompt[0, :PREFIX], cache=restored)
        assert int(mask.count_nonzero()) == PREFIX
        warm = restored.install(model.config, PREFIX)
    assert warm.get_seq_length() == PREFIX

    control = fill(model, prompt)
    control.crop(PREFIX - 75)
    assert torch.equal(run(model, prompt[:, PREFIX:], warm), run(model, prompt[:, PREFIX:], control))
    assert warm.get_seq_length() == 75


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_static_cache(
    make: Callable[..., PreTrainedModel], family: str, dtype: torch.dtype, config: dict[str, Any], prompt: torch.Tensor
) -> None:
    model = make(family, dtype=dtype)
    control = static(model)
    run(model, prompt, control)
    warm = static(model)
    addresses = [(layer.keys.data_ptr(), layer.cumulative_length.data_ptr()) for layer in warm.layers]
    with Engine.open(config, spec_of(model)) as engine:
        engine.store(prompt[0], cache=control)
        assert int(engine.retrieve(prompt[0, :PREFIX], cache=warm).count_nonzero()) == PREFIX
    assert int(warm.get_seq_length()) == PREFIX
    assert [(layer.keys.data_ptr(), layer.cumulative_length.data_ptr()) for layer in warm.layers] == addresses

    set_length(control, PREFIX)
    assert torch.equal(run(model, prompt[:, PREFIX:], warm), run(model, prompt[:, PREFIX:], control))


def test_one_kind_of_cache_serves_the_other(
    llama: PreTrainedModel, config: dict[str, Any], prompt: torch.Tensor
) -> None:
    dynamic = fill(llama, prompt)
    with Engine.open(config, spec_of(llama)) as engine:
        engine.store(prompt[0], cache=dynamic)
        warm = static(llama)
        engine.retrieve(prompt[0, :PREFIX], cache=warm)
    for ours, theirs in zip(warm.layers, dynamic.layers, strict=True):
        assert torch.equal(ours.keys[:, :, :PREFIX], theirs.keys[:, :, :PREFIX])
        assert torch.equal(ours.values[:, :, :PREFIX], theirs.values[:, :, :PREFIX])
        assert not ours.keys[:, :, PREFIX:].any()


def test_installed_cache_can_be_shorter_and_is_a_view(llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    restored = RestoredKV.allocate(spec_of(llama), PREFIX)
    for tensor in (*restored.keys, *restored.values):
        tensor.normal_()
    cache = restored.install(llama.config, 48)
    assert cache.get_seq_length() == 48
    assert cache.layers[1].keys.data_ptr() == restored.keys[1].data_ptr()
    assert cache.layers[1].dtype == torch.float32 and cache.layers[1].device == torch.device("cpu")
    assert torch.equal(cache.layers[2].values, restored.values[2][:, :, :48])
    assert restored.install(llama.config, 0).get_seq_length() == 0
    with pytest.raises(ValueError, match="65 of the 64"):
        restored.install(llama.config, 65)
    with pytest.raises(ValueError, match="devices: 2 for 3 layers"):
        RestoredKV.allocate(spec_of(llama), PREFIX, devices=("cpu", "cpu"))


def test_caches_made_in_inference_mode(llama: PreTrainedModel, config: dict[str, Any], prompt: torch.Tensor) -> None:
    with torch.inference_mode():
        full, warm = fill(llama, prompt), static(llama)
    with Engine.open(config, spec_of(llama)) as engine:
        engine.store(prompt[0], cache=full)
        assert int(engine.retrieve(prompt[0], cache=warm).count_nonzero()) == PREFIX
