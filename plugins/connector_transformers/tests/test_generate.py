"""The three lines: what `generate` of a CachedModel takes, gives back, keeps and refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, PreTrainedModel

from kvloom import BackendError, Chunk, ConfigError, Engine
from kvloom_connector_transformers import CachedModel, TransformersConnector, cached

Make = Callable[..., PreTrainedModel]


@pytest.fixture
def model(llama: PreTrainedModel, config: dict[str, Any]) -> Iterator[CachedModel]:
    with cached(llama, config) as model:
        yield model


def tokens(rows: int, count: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, 128, (rows, count), generator=torch.Generator().manual_seed(seed))


def first_logits(model: Any, prompt: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    options = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(prompt, **options, **kwargs).logits[0]


def split_run(model: PreTrainedModel, prompt: torch.Tensor, first: torch.Tensor, keep: int) -> torch.Tensor:
    """Logits of the next token when `first` was run as one, cropped to `keep` tokens, and the rest run on top."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=first, past_key_values=cache, use_cache=True)
    cache.crop(keep - first.shape[1])
    return first_logits(model, prompt, past_key_values=cache)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "bloom", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_second_call_starts_from_stored_kv_and_is_exact(
    make: Make, family: str, dtype: torch.dtype, config: dict[str, Any], prompt: torch.Tensor
) -> None:
    plain = make(family, dtype=dtype)
    longer = torch.cat([prompt, tokens(1, 30)], 1)
    with cached(plain, config) as model:
        first_logits(model, prompt)
        assert model.last is not None and model.last.hit_tokens == 0
        warm = first_logits(model, longer)
        assert (model.last.prompt_tokens, model.last.hit_tokens, model.last.rows) == (105, 64, 1)
        assert model.last.by_tier == {"memory": 64}
        assert model.last.note == ""
    assert torch.equal(warm, split_run(plain, longer, prompt, 64))


def test_generation_goes_on_as_without_kvloom(model: CachedModel, prompt: torch.Tensor) -> None:
    expected = model.model.generate(prompt, max_new_tokens=20, do_sample=False)
    for hit in (0, 64):
        assert torch.equal(model.generate(prompt, max_new_tokens=20, do_sample=False), expected)
        assert model.last is not None and model.last.hit_tokens == hit


def test_the_last_token_is_always_computed(model: CachedModel) -> None:
    prompt = tokens(1, 64)
    for hit in (0, 63):
        model.generate(prompt, max_new_tokens=1)
        assert model.last is not None and model.last.hit_tokens == hit == sum(model.last.by_tier.values())


def test_one_token(model: CachedModel) -> None:
    assert model.generate(tokens(1, 1), max_new_tokens=3, do_sample=False).shape == (1, 4)
    assert model.last is not None and model.last.hit_tokens == 0


def test_input_forms(model: CachedModel, prompt: torch.Tensor) -> None:
    greedy = GenerationConfig(max_new_tokens=4, do_sample=False)
    expected = model.generate(prompt, greedy)
    for output in (
        model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), generation_config=greedy),
        model.generate(prompt.to(torch.int32), max_new_tokens=4, do_sample=False).long(),
        model.generate(prompt, greedy, return_dict_in_generate=True).sequences,
        model.generate(prompt, greedy, prefill_chunk_size=8),
        model.generate(prompt, greedy, position_ids=None, token_type_ids=None),
    ):
        assert torch.equal(output, expected)


def test_rows_share_the_shortest_hit(model: CachedModel, config: dict[str, Any]) -> None:
    one, two = tokens(1, 75, seed=1), tokens(1, 75, seed=2)
    model.generate(one, max_new_tokens=1)
    model.generate(two[:, :40], max_new_tokens=1)
    both = torch.cat([one, two])
    expected = model.model.generate(both, max_new_tokens=10, do_sample=False)
    for hit in (32, 64):
        assert torch.equal(model.generate(both, max_new_tokens=10, do_sample=False), expected)
        assert model.last is not None
        assert (model.last.rows, model.last.hit_tokens) == (2, hit)


def test_rows_of_a_batch_are_found_one_by_one(model: CachedModel) -> None:
    both = tokens(2, 75)
    model.generate(both, max_new_tokens=1)
    for row in both:
        assert model.engine.lookup(row).tokens == 64


@pytest.mark.parametrize("keep", [False, True])
def test_save_decode_cache(llama: PreTrainedModel, config: dict[str, Any], prompt: torch.Tensor, keep: bool) -> None:
    with cached(llama, config | {"save_decode_cache": keep}) as model:
        output = model.generate(prompt, max_new_tokens=22, do_sample=False)
        assert output.shape[1] == 97
        # KV of all but the last generated token was computed: 96 tokens, 6 chunks.
        assert model.engine.lookup(output[0]).tokens == (96 if keep else 64)
        warm = first_logits(model, output)
        assert model.last is not None and model.last.hit_tokens == (96 if keep else 64)
        if keep:
            cache = DynamicCache(config=llama.config)
            llama.generate(prompt, max_new_tokens=22, do_sample=False, past_key_values=cache)
            assert torch.equal(warm, first_logits(llama, output, past_key_values=cache))


def test_store_false_keeps_nothing(model: CachedModel, prompt: torch.Tensor) -> None:
    model.generate(prompt, max_new_tokens=1, store=False)
    assert model.engine.lookup(prompt[0]).tokens == 0


def test_salts_do_not_share(model: CachedModel, prompt: torch.Tensor) -> None:
    model.generate(prompt, max_new_tokens=1, salt="a")
    for salt, hit in (("b", 0), (None, 0), ("a", 64)):
        model.generate(prompt, max_new_tokens=1, salt=salt, store=False)
        assert model.last is not None and model.last.hit_tokens == hit


def test_two_fine_tunes_do_not_share(make: Make, config: dict[str, Any], prompt: torch.Tensor, tmp_path: Path) -> None:
    config = config | {"tiers": [*config["tiers"], {"type": "disk", "path": str(tmp_path), "capacity": "64MiB"}]}
    pytest.importorskip("kvloom_backend_disk")
    for change, hit in ((0.0, 0), (1e-3, 0), (0.0, 64)):
        model = make("llama")
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight[0, 0] += change
        with cached(model, config) as opened:
            opened.generate(prompt, max_new_tokens=1)
            assert opened.last is not None and opened.last.hit_tokens == hit


def test_weights_that_change_between_calls(model: CachedModel, prompt: torch.Tensor) -> None:
    weight = model.model.model.layers[1].mlp.up_proj.weight
    original = weight.detach().clone()
    for value, hit in ((original, 0), (original * 1.01, 0), (original, 64), (original * 1.01, 64)):
        weight.data = value.clone()
        expected = model.model.generate(prompt, max_new_tokens=5, do_sample=False)
        assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), expected)
        assert model.last is not None and model.last.hit_tokens == hit


def test_many_states_of_one_model(model: CachedModel, prompt: torch.Tensor) -> None:
    weight = model.model.lm_head.weight
    for _ in range(20):
        weight.data = weight.data * 1.01
        model.generate(prompt, max_new_tokens=1)
        assert model.last is not None and model.last.hit_tokens == 0
    assert len(model._states) == 8


def test_kv_of_another_shape_is_not_kept(model: CachedModel, prompt: torch.Tensor) -> None:
    model.model.to(torch.bfloat16)
    model.generate(prompt, max_new_tokens=1)
    assert model.last is not None and "another shape or dtype" in model.last.note
    model.generate(prompt, max_new_tokens=1)
    assert model.last.hit_tokens == 0


def test_what_is_computed_on_lossy_kv_is_not_kept_as_exact(
    model: CachedModel, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.generate(prompt, max_new_tokens=1)
    write = TransformersConnector.write

    def lossy(self: Any, segments: Any, chunks: Any, **where: Any) -> None:
        write(self, segments, [Chunk(c.tensor, c.format, c.num_tokens, fidelity="worn") for c in chunks], **where)

    monkeypatch.setattr(TransformersConnector, "write", lossy)
    longer = torch.cat([prompt, tokens(1, 40)], 1)
    model.generate(longer, max_new_tokens=1)
    assert model.last is not None and model.last.hit_tokens == 64
    assert "worn" in model.last.note
    assert model.engine.lookup(longer[0]).tokens == 64


@pytest.mark.parametrize("verb", ["lookup", "retrieve", "store"])
def test_a_failing_engine_is_a_miss(
    model: CachedModel,
    prompt: torch.Tensor,
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError("the disk is on fire")

    monkeypatch.setattr(Engine, verb, broken)
    with caplog.at_level(logging.WARNING, "kvloom"):
        assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), expected)
    assert "the disk is on fire" in caplog.text
    assert model.last is not None and model.last.hit_tokens == (64 if verb == "store" else 0)


def test_a_new_state_of_the_model_whose_engine_fails_is_served_without_the_cache(
    model: CachedModel, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.no_grad():
        model.model.lm_head.weight *= 1.01
    expected = model.model.generate(prompt, max_new_tokens=5, do_sample=False)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise BackendError("memory: all 4 threads are held")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "kvloom"):
        patch.setattr(Engine, "sibling", broken)
        for store in (True, False):
            assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False, store=store), expected)
            assert model.last is not None and model.last.hit_tokens == 0
            assert model.last.note == "served without the cache: memory: all 4 threads are held"
    assert caplog.text.count("WARNING") == 1
    for hit in (0, 64):
        model.generate(prompt, max_new_tokens=1)
        assert model.last is not None and (model.last.hit_tokens, model.last.note) == (hit, "")


def test_an_engine_that_does_not_close_is_no_error_while_serving(
    model: CachedModel, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> None:
        raise BackendError("did not close")

    monkeypatch.setattr("kvloom_connector_transformers.model._STATES", 1)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "kvloom"):
        patch.setattr(Engine, "close", broken)
        for _ in range(2):
            with torch.no_grad():
                model.model.lm_head.weight *= 1.01
            model.generate(prompt, max_new_tokens=1)
    assert "did not close" in caplog.text


def test_retrieve_may_give_less_than_lookup_said(
    model: CachedModel, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False)
    retrieve = Engine.retrieve

    def less(self: Engine, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        mask = torch.zeros(tokens.numel(), dtype=torch.bool)
        mask[:32] = retrieve(self, tokens[:32], **kwargs)
        return mask

    monkeypatch.setattr(Engine, "retrieve", less)
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), expected)
    assert model.last is not None and model.last.hit_tokens == 32


ROW = torch.full((1, 20), 5)


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({}, "input_ids: expected a .* got NoneType"),
        ({"inputs": ROW, "input_ids": ROW}, "input_ids: passed twice"),
        ({"inputs": ROW[0]}, "input_ids: expected .rows, tokens."),
        ({"inputs": ROW[:, :0]}, "input_ids: expected .rows, tokens."),
        ({"inputs": ROW.float()}, "input_ids: expected token ids, got torch.float32"),
        ({"inputs": ROW, "pixel_values": torch.zeros(1, 3, 8, 8)}, "pixel_values: it is not made of token ids"),
        ({"inputs": ROW, "image_grid_thw": ROW}, "image_grid_thw: it is not made of token ids"),
        ({"inputs": ROW, "input_features": ROW}, "input_features: it is not made of token ids"),
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, "inputs_embeds: it is not made of token ids"),
        ({"inputs": ROW, "attention_mask": (torch.arange(20) > 2)[None].long()}, "attention_mask: padding moves"),
        ({"inputs": ROW, "attention_mask": (torch.arange(20) < 9)[None].long()}, "attention_mask: padding moves"),
        ({"inputs": ROW, "attention_mask": torch.ones(1, 25)}, "attention_mask: expected a tensor of shape"),
        ({"inputs": ROW, "pad_token_id": 5}, "attention_mask: missing, though input_ids holds the padding token"),
        ({"inputs": ROW, "position_ids": ROW}, "position_ids: stored KV is at positions"),
        ({"inputs": ROW, "cache_position": ROW[0]}, "cache_position: stored KV is at positions"),
        ({"inputs": ROW, "token_type_ids": ROW * 0}, "token_type_ids: token types change"),
        ({"inputs": ROW, "encoder_outputs": (ROW,)}, "encoder_outputs: there is no encoder"),
        ({"inputs": ROW, "decoder_input_ids": ROW}, "decoder_input_ids: there is no decoder"),
        ({"inputs": ROW, "past_key_values": DynamicCache()}, "past_key_values: CachedModel passes"),
        ({"inputs": ROW, "cache_implementation": "static"}, "cache_implementation: 'static'"),
        ({"inputs": ROW, "num_beams": 2}, "num_beams: 2 "),
        ({"inputs": ROW, "num_return_sequences": 2}, "num_return_sequences: 2 "),
        ({"inputs": ROW, "assistant_model": torch.nn.Identity()}, "assistant_model: speculative"),
        ({"inputs": ROW, "prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens: 3 "),
        ({"inputs": ROW, "use_cache": False}, "use_cache: False "),
        ({"inputs": ROW, "token_healing": True}, "token_healing: True "),
        ({"inputs": ROW, "custom_generate": "somewhere/else"}, "custom_generate: a decoding loop"),
        ({"inputs": ROW, "penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
        ({"inputs": ROW, "adapter_names": ["a"]}, "adapter_names: rows with different adapters"),
        ({"inputs": ROW, "something_new": 1}, "something_new: kvloom does not know this argument"),
    ],
)
def test_refused_calls(model: CachedModel, kwargs: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        model.generate(**kwargs, max_new_tokens=1)
    assert model.last is None


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences", "prompt_lookup_num_tokens"])
def test_refused_settings_of_a_generation_config(model: CachedModel, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: 3 "):
        model.generate(ROW, GenerationConfig(do_sample=True, **{name: 3}))
    setattr(model.model.generation_config, name, 3)
    with pytest.raises(ValueError, match=f"{name}: 3 "):
        model.generate(ROW)


def test_padding_token_as_text_is_fine_with_a_mask(model: CachedModel) -> None:
    model.generate(ROW, attention_mask=torch.ones_like(ROW), pad_token_id=5, max_new_tokens=1)


def test_training_mode_is_refused(model: CachedModel) -> None:
    model.model.train()
    with pytest.raises(ValueError, match="training mode"):
        model.generate(ROW)
    model.model.eval()
    model.model.model.layers[0].mlp.dropout = torch.nn.Dropout(0.1)
    with pytest.raises(ValueError, match="training mode"):
        model.generate(ROW)


def test_a_configuration_is_checked_before_the_weights_are_read(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^tiers\.0\.pth: unknown key"):
        cached(None, config | {"tiers": [{"type": "disk", "path": "kv", "pth": "kv"}]})


def test_another_connector_is_a_config_error(llama: PreTrainedModel, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="connector"):
        cached(llama, config | {"connector": "plain"})


def test_the_wrapper_passes_as_the_model(model: CachedModel) -> None:
    assert model.config is model.model.config
    assert model.device == torch.device("cpu")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = model.no_such_thing


def test_a_model_loaded_with_a_device_map(
    llama: PreTrainedModel, config: dict[str, Any], prompt: torch.Tensor, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    llama.save_pretrained(tmp_path)
    with cached(AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu"), config) as model:
        for hit in (0, 64):
            output = model.generate(prompt, max_new_tokens=8, do_sample=False)
            assert model.last is not None and model.last.hit_tokens == hit
            assert torch.equal(output, llama.generate(prompt, max_new_tokens=8, do_sample=False))


def test_close_twice(llama: PreTrainedModel, config: dict[str, Any]) -> None:
    model = cached(llama, config)
    model.close()
    model.close()
