"""Models with sliding windows and chunked attention go on from stored KV exactly as from transformers' own cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvloom import Engine
from kvloom_connector_transformers import RestoredKV, cached, spec_of

Make = Callable[..., PreTrainedModel]

GEMMA3 = {"head_dim": 8, "num_hidden_layers": 6}
LLAMA4 = {
    "head_dim": 8,
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "num_local_experts": 2,
    "intermediate_size_mlp": 32,
    "attn_temperature_tuning": True,
    "floor_scale": 16,
}
GPT_OSS = {
    "head_dim": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
KINDS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma2": {"head_dim": 8},
    "gemma3_text": GEMMA3,
    "cohere2": {},
    "gpt_oss": GPT_OSS,
    "llama4_text": LLAMA4,
}


def windowed(make: Make, family: str, window: int, **settings: Any) -> PreTrainedModel:
    name = "attention_chunk_size" if family == "llama4_text" else "sliding_window"
    return make(family, **KINDS[family] | {name: window} | settings)


def prompt_of(count: int) -> torch.Tensor:
    return torch.randint(3, 128, (1, count), generator=torch.Generator().manual_seed(count))


def own_run(model: PreTrainedModel, prompt: torch.Tensor, first: int, keep: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and logits of transformers' own cache: `first` tokens in one run, cropped to `keep`, then the rest."""
    cache = DynamicCache(config=model.config)
    if keep < first:
        cache.activate_past_recording()
    if keep:
        with torch.no_grad():
            model(input_ids=prompt[:, :first], past_key_values=cache, use_cache=True)
        if keep < first:
            cache.crop(keep - first)
    return generate(model, prompt, past_key_values=cache)


def generate(model: Any, prompt: torch.Tensor, *, new: int = 4, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    output = model.generate(
        prompt, max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True, **kwargs
    )
    return output.sequences, torch.stack(output.logits)


def assert_goes_on_as_own_cache(
    model: PreTrainedModel, config: dict[str, Any], first_counts: tuple[int, ...], more: tuple[int, ...]
) -> None:
    """After a run of `first` tokens, a prompt of that many and more tokens equals transformers' own continuation."""
    with cached(model, config) as served:
        for first in first_counts:
            for count in (first + extra for extra in more):
                prompt, salt = prompt_of(count), f"{first} {count}"
                generate(served, prompt[:, :first], new=1, salt=salt)
                tokens, logits = generate(served, prompt, salt=salt)
                hit = min(first // 16 * 16, count - 1)
                assert served.last is not None and served.last.hit_tokens == hit
                own_tokens, own_logits = own_run(model, prompt, first, hit)
                assert torch.equal(tokens, own_tokens) and torch.equal(logits, own_logits), (first, count)


@pytest.mark.parametrize("window", [15, 16, 17, pytest.param(33, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["gemma3_text", "llama4_text", "mistral"])
def test_a_hit_goes_on_as_transformers_own_cache(make: Make, family: str, window: int, config: dict[str, Any]) -> None:
    assert_goes_on_as_own_cache(windowed(make, family, window), config, (16, 33), (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.float32) for family in sorted(KINDS)), ("gemma3_text", torch.bfloat16)]
)
def test_every_edge_of_chunk_and_window(make: Make, family: str, dtype: torch.dtype, config: dict[str, Any]) -> None:
    for window in (2, 15, 16, 17, 31, 32, 33):
        model = windowed(make, family, window, dtype=dtype)
        assert_goes_on_as_own_cache(model, config, (15, 16, 17, 32, 33), (0, 1, 15))


def test_a_hit_at_any_chunk_of_a_longer_run(make: Make, config: dict[str, Any]) -> None:
    model = windowed(make, "gemma3_text", 20)
    prompt = prompt_of(80)
    with cached(model, config | {"save_decode_cache": True}) as served:
        tokens, _ = generate(served, prompt, new=17)
        assert served.engine.lookup(tokens[0]).tokens == 96, "windowed layers keep what decoding computes too"
        other = torch.cat([prompt[:, :40], prompt_of(30)], 1)
        _, logits = generate(served, other)
        assert served.last is not None and served.last.hit_tokens == 32
    reference = DynamicCache(config=model.config)
    reference.activate_past_recording()
    with torch.no_grad():
        model(input_ids=prompt, past_key_values=reference, use_cache=True)
    reference.crop(32 - 80)
    assert torch.equal(logits, generate(model, other, past_key_values=reference)[1])


def test_a_cache_that_dropped_tokens_is_refused(make: Make, config: dict[str, Any]) -> None:
    model, prompt = windowed(make, "gemma3_text", 8), prompt_of(32)
    with Engine.open(config, spec_of(model)) as engine:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=prompt, past_key_values=cache, use_cache=True)
        with pytest.raises(ValueError, match="layer 0 has a window and kept 7 of 32 tokens; call activate_past_rec"):
            engine.store(prompt[0], cache=cache)
        recording = DynamicCache(config=model.config)
        recording.activate_past_recording()
        with torch.no_grad():
            model(input_ids=prompt, past_key_values=recording, use_cache=True)
        engine.store(prompt[0], cache=recording)
        assert engine.lookup(prompt[0]).tokens == 32
        restored = RestoredKV.allocate(engine.spec, 32)
        assert engine.retrieve(prompt[0], cache=restored).all()
        for ours, theirs in zip(restored.install(model.config, 32).layers, recording.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
            assert ours.get_seq_length() == 32


def test_keys_name_kinds_and_windows(make: Make) -> None:
    kinds = ["sliding_attention", "chunked_attention", "full_attention"]
    wide = {"sliding_window": 16, "attention_chunk_size": 16}
    models = [
        make("mistral", sliding_window=16),
        make("mistral", sliding_window=17),
        make("mistral"),
        make("mistral", layer_types=kinds, **wide),
        make("mistral", layer_types=kinds[::-1], **wide),
    ]
    named = [spec_of(model).revision for model in models]
    assert len(set(named)) == len(named)
    assert "layers 0-2 sliding_attention of 16, on cpu" in named[0]
    assert "layers 0-2 sliding_attention of 17, on cpu" in named[1]
    assert "sliding" not in named[2]
    assert "layer 0 sliding_attention of 16, layer 1 chunked_attention of 16, on cpu" in named[3]


def test_a_release_that_cannot_record_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DynamicCache.__mro__[1], "activate_past_recording")
    with pytest.raises(ValueError, match=r"layers 0-2: sliding-window or chunked .* this transformers cannot"):
        spec_of(windowed(make, "mistral", 16))
    spec_of(make("mistral"))
