"""The rotations of models of transformers: what is found is what moves their K, and nothing else passes the gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom_blend.rotation import Rotation, Rotations, gate, rotations_of
from kvloom_blend.rotation.gate import check
from kvloom_blend.rotation.models import unwrapped
from kvloom_blend.rotation.probe import Probe, probe

T = pytest.importorskip("transformers", reason="models are those of transformers")

SMALL = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
SEEN = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


def rope(kind: str, **how: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **how}}


LONG = rope("longrope", short_factor=[1.5] * 8, long_factor=[4.0] * 8, original_max_position_embeddings=4096)
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: T.LlamaConfig(**SMALL),
    "llama3": lambda: T.LlamaConfig(
        **SMALL,
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=1024),
    ),
    "yarn": lambda: T.LlamaConfig(**SMALL, **rope("yarn", factor=4.0, original_max_position_embeddings=1024)),
    "linear": lambda: T.LlamaConfig(**SMALL, **rope("linear", factor=4.0)),
    "dynamic": lambda: T.LlamaConfig(**SMALL, **rope("dynamic", factor=2.0)),
    "longrope": lambda: T.Phi3Config(**{**SMALL, "max_position_embeddings": 8192}, **LONG),
    "mistral": lambda: T.MistralConfig(**SMALL, sliding_window=64),
    "qwen2": lambda: T.Qwen2Config(**SMALL),
    "qwen3": lambda: T.Qwen3Config(**SMALL, head_dim=32),
    "gemma": lambda: T.GemmaConfig(**SMALL, head_dim=32),
    "gemma3": lambda: T.Gemma3TextConfig(**SMALL, head_dim=32, layer_types=TYPES),
    "phi": lambda: T.PhiConfig(**SMALL),
    "phi3": lambda: T.Phi3Config(**SMALL),
    "cohere": lambda: T.CohereConfig(**SMALL),
    "cohere2": lambda: T.Cohere2Config(**SMALL, layer_types=TYPES),
    "glm": lambda: T.GlmConfig(**SMALL, head_dim=16),
    "smollm3": lambda: T.SmolLM3Config(**SMALL, no_rope_layers=[1, 1, 0, 1]),
    "gpt_neox": lambda: T.GPTNeoXConfig(**SMALL),
    "deepseek_v3": lambda: T.DeepseekV3Config(**{**SMALL, **LATENT}),
    "deepseek_v3, halves": lambda: T.DeepseekV3Config(**{**SMALL, **LATENT}, rope_interleave=False),
    "deepseek_v2": lambda: T.DeepseekV2Config(**{**SMALL, **LATENT}),
    "qwen2_vl": lambda: T.Qwen2VLConfig(
        text_config={**SMALL, **rope("default", mrope_section=[2, 3, 3])}, vision_config=SEEN
    ),
}
FOUND = {  # head size, pairs, first dim, interleaved; and layers without
    "qwen3": (32, 16, 0, False), "gemma": (32, 16, 0, False), "gemma3": (32, 16, 0, False), "phi": (16, 4, 0, False),
    "cohere": (16, 8, 0, True), "cohere2": (16, 8, 0, True, 2), "glm": (16, 4, 0, True),
    "smollm3": (16, 8, 0, False, 2), "gpt_neox": (16, 2, 0, False), "deepseek_v3": (48, 8, 32, False),
    "deepseek_v3, halves": (48, 8, 32, False), "deepseek_v2": (48, 8, 32, True),
}  # fmt: skip
LIMITED = {"dynamic", "longrope"}
"""Types of rope whose frequencies hold for sequences up to a length."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models as small as these are ten times slower on two, where another process has one of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    kind = T.AutoModelForImageTextToText if name.endswith("_vl") else T.AutoModelForCausalLM
    return kind.from_config(MODELS[name]()).to(dtype).eval()


@cache
def found(name: str, dtype: torch.dtype = torch.float32) -> Rotations:
    return rotations_of(model_of(name, dtype), max_length=4096 if name in LIMITED else None)


@torch.inference_mode()
def kept(model: Any, tokens: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    """K of each layer `[tokens, heads * head size]`, of one sequence; of MLA the latent and its rope slice."""
    cache = T.DynamicCache()  # which knows no window, and keeps all of it
    model(input_ids=tokens[None], position_ids=positions[None], past_key_values=cache, use_cache=True)
    rows = []
    for layer in cache.layers:
        latent = layer.keys.shape[-1] != layer.values.shape[-1]
        k = torch.cat((layer.keys, layer.values), -1) if latent else layer.keys
        rows.append(k[0].transpose(0, 1).flatten(1))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_found_passes_the_gate(name: str, dtype: torch.dtype) -> None:
    rotations = found(name, dtype)
    gate(model_of(name, dtype), rotations)
    head_size, pairs, start, interleaved, *without = FOUND.get(name, (16, 8, 0, False))
    assert [number for number, rotation in enumerate(rotations) if rotation is None] == without
    for rotation in filter(None, rotations):
        assert (rotation.head_size, rotation.pairs) == (head_size, pairs)
        assert (rotation.start, rotation.interleaved) == (start, interleaved)


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_elsewhere_has_the_k_that_is_turned_there(name: str) -> None:
    """Attention sees how far tokens are apart: moved as a whole, a sequence has the same K but for the rotation."""
    model, rotations = model_of(name), found(name)
    tokens = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(1))
    old, new = torch.arange(24), torch.arange(24) + 3000
    here, there = kept(model, tokens, old), kept(model, tokens, new)
    for turned, expected in zip(rotations.apply(here, rotations.turns(old, new)), there, strict=True):
        assert torch.allclose(turned, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "llama3", "yarn", "linear", "dynamic"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(old=st.integers(0, 130_000), new=st.integers(0, 130_000), seed=st.integers(0, 1 << 20))
def test_ropes_of_every_type_are_moved_anywhere_within_the_bounds(kind: str, old: int, new: int, seed: int) -> None:
    """With a model's own code, K of N(0, 1): 2e-6 in float32; 0.05 in bfloat16, which the model rounds too."""
    config = MODELS[kind]()
    config.max_position_embeddings, config.head_dim = 1 << 17, 128
    module = T.models.llama.modeling_llama
    rotary = module.LlamaRotaryEmbedding(config)
    rotation = Rotation(rotary.inv_freq, head_size=128)
    k = torch.randn(1, 2, 64, 128, generator=torch.Generator().manual_seed(seed))
    before, after = torch.arange(64) + old, torch.arange(64) + new

    def at(positions: torch.Tensor) -> torch.Tensor:
        cos, sin = rotary(k, positions[None])
        return module.apply_rotary_pos_emb(k, k, cos, sin)[1][0].transpose(0, 1).flatten(1)

    turn = rotation.turn(before, after)
    for dtype, bound in {torch.float32: 2e-6, torch.bfloat16: 0.05}.items():
        assert (rotation.apply(at(before).to(dtype), turn).float() - at(after)).abs().max() <= bound


def test_layers_of_gemma3_have_two_ropes_and_share_them() -> None:
    one, again, other, last = found("gemma3")
    assert one is again is last and one is not other
    assert one is not None and other is not None and not torch.equal(one.inv_freq, other.inv_freq)


def test_sections_of_mrope_are_found() -> None:
    rotation = found("qwen2_vl")[0]
    assert rotation is not None and rotation.sections is not None
    assert rotation.sections.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("name", sorted(LIMITED))
def test_frequencies_that_move_with_the_length_need_a_limit(name: str) -> None:
    model = model_of(name)
    for length in (None, 4097):
        with pytest.raises(ValueError, match=r"more than 4096 tokens.*max_length=4096"):
            rotations_of(model, max_length=length)
    with torch.inference_mode():  # a long sequence leaves other frequencies behind
        model(input_ids=torch.ones(1, 1, dtype=torch.long), position_ids=torch.tensor([[9000]]))
    rotations = rotations_of(model, max_length=4096)
    assert rotations.max_length == 4096
    rotation = rotations[0]
    assert rotation is not None and torch.equal(rotation.inv_freq, model.model.rotary_emb.original_inv_freq)


def test_longrope_whose_factors_are_the_same_does_not_move() -> None:
    same = rope("longrope", short_factor=[1.5] * 8, long_factor=[1.5] * 8, original_max_position_embeddings=1024)
    model = T.AutoModelForCausalLM.from_config(T.Phi3Config(**SMALL, **same))
    assert rotations_of(model).max_length is None


def changed(rotation: Rotation | None, **how: Any) -> Rotation:
    assert rotation is not None
    own = {name: getattr(rotation, name) for name in ("head_size", "interleaved", "start", "sections")}
    return Rotation(how.pop("inv_freq", rotation.inv_freq), **{**own, **how})


def passes(what: str, seen: Probe, rotations: Rotations) -> None:
    """For the test's report: which of them did."""
    check(seen, rotations)
    pytest.fail(what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "yarn", "glm", "gemma3", "deepseek_v3", "qwen2_vl"])
def test_the_gate_notices_frequencies_and_layouts_that_are_not_the_models(name: str, dtype: torch.dtype) -> None:
    rotations, seen = found(name, dtype), probe(*unwrapped(model_of(name, dtype)))
    rotation = rotations[2]
    assert rotation is not None
    fast = torch.ones(rotation.pairs)
    fast[1] = 1.001
    wrong = {
        "all are perturbed": changed(rotation, inv_freq=rotation.inv_freq * 1.001),
        "one is perturbed": changed(rotation, inv_freq=rotation.inv_freq * fast),
        "without its scaling": changed(rotation, inv_freq=rotation.inv_freq * 4),
        "the other layout": changed(rotation, interleaved=not rotation.interleaved),
        "less of it": changed(rotation, inv_freq=rotation.inv_freq[:-1], sections=None),
        "none": None,
    }
    if 2 * rotation.pairs < rotation.head_size:
        wrong["elsewhere in the head"] = changed(
            rotation, start=rotation.head_size - 2 * rotation.pairs - rotation.start
        )
    if rotation.sections is not None:
        wrong["other sections"] = changed(rotation, sections=rotation.sections.roll(1))
        wrong["no sections"] = None
    for what, instead in wrong.items():
        layers = list(rotations)
        layers[2] = instead
        with pytest.raises(ValueError, match=r"^layer 2: "):
            passes(what, seen, Rotations(layers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_notices_a_model_that_changes(dtype: torch.dtype) -> None:
    model = model_of.__wrapped__("llama", dtype)
    model.model.rotary_emb.float()
    rotations = rotations_of(model)
    model.model.rotary_emb.inv_freq.mul_(1.001)
    with pytest.raises(ValueError, match=r"layer 0: .* off"):
        gate(model, rotations)
    gate(model, rotations_of(model))


def test_the_gate_notices_code_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's own code for K counts, whatever its frequencies are."""
    model, rotations = model_of("llama"), found("llama")
    module = T.models.llama.modeling_llama
    theirs = module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: theirs(q, k, cos, -sin))
    with pytest.raises(ValueError, match=r"layer 0: .* off"):
        gate(model, rotations)
    with pytest.raises(ValueError, match=r"layer 0: .*unknown kind"):
        rotations_of(model)


def test_the_gate_notices_a_rope_where_there_is_none_and_layers_that_are_missing() -> None:
    rotations = list(found("smollm3"))
    with pytest.raises(ValueError, match="layer 2: "):
        gate(model_of("smollm3"), Rotations([rotations[0]] * 4))
    with pytest.raises(ValueError, match="of 3 layers"):
        gate(model_of("smollm3"), Rotations(rotations[:3]))
    with pytest.raises(ValueError, match="layer 0: K has heads of 16, not 32"):
        gate(model_of("smollm3"), Rotations([changed(rotations[0], head_size=32)] * 4))


def test_k_that_is_zero_proves_nothing() -> None:
    model = model_of.__wrapped__("llama")
    rotations = rotations_of(model)
    torch.nn.init.zeros_(model.model.layers[1].self_attn.k_proj.weight)
    with pytest.raises(ValueError, match=r"layer 1: .*inf off"):
        gate(model, rotations)


TINY = {"vocab_size": 300, "hidden_size": 64, "n_layer": 2, "n_head": 4}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "bloom": (lambda: T.BloomConfig(**TINY), "BloomForCausalLM has ALiBi"),
    "mpt": (lambda: T.MptConfig(vocab_size=300, d_model=64, n_layers=2, n_heads=4), "ALiBi"),
    "falcon": (lambda: T.FalconConfig(**SMALL, alibi=True), "ALiBi"),
    "gpt2": (lambda: T.GPT2Config(**TINY), r"GPT2LMHeadModel has learned positions \(wpe\)"),
    "opt": (lambda: T.OPTConfig(**SMALL), "learned positions"),
    "gptj": (lambda: T.GPTJConfig(vocab_size=300, n_embd=64, n_layer=2, n_head=4, rotary_dim=8), "inv_freq"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_positions_that_no_rotation_moves_are_refused(name: str) -> None:
    config, reason = REFUSED[name]
    with pytest.raises(ValueError, match=f"^model: .*{reason}"):
        rotations_of(T.AutoModelForCausalLM.from_config(config()))


def test_a_type_of_rope_that_is_not_known_is_refused() -> None:
    model = model_of.__wrapped__("llama")
    model.config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(ValueError, match=r"rope_type: 'spiral' is unknown"):
        rotations_of(model)


def test_layers_that_keep_a_state_are_refused() -> None:
    linear = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "linear_num_value_heads": 4}
    sizes = {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 32}
    config = T.Qwen3NextConfig(**SMALL, **linear, **sizes, shared_expert_intermediate_size=32)
    with pytest.raises(ValueError, match=r"^layer 0: LinearAttention.* K and V of each token"):
        rotations_of(T.AutoModelForCausalLM.from_config(config))


def test_what_is_no_model_of_transformers_or_has_no_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a model of transformers, got Linear"):
        rotations_of(torch.nn.Linear(2, 2))
    with torch.device("meta"):
        model = T.AutoModelForCausalLM.from_config(MODELS["llama"]())
    with pytest.raises(ValueError, match="no weights yet"):
        rotations_of(model)


def test_a_model_with_adapters_and_one_in_training_are_tried_as_they_run() -> None:
    peft = pytest.importorskip("peft")
    model = model_of.__wrapped__("llama")
    lora = peft.LoraConfig(r=4, target_modules=["k_proj"], lora_dropout=0.5, init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora)
    adapted.train()
    rotations = rotations_of(adapted)
    gate(adapted, rotations)
    assert len(rotations) == 4 and adapted.training and model.model.layers[0].self_attn.k_proj.training
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    assert len(rotations_of(peft.get_peft_model(model_of.__wrapped__("llama"), prompts))) == 4


def test_what_was_found_stays_when_the_model_moves() -> None:
    model = model_of.__wrapped__("llama")
    rotation = rotations_of(model)[0]
    assert rotation is not None
    before = rotation.inv_freq.clone()
    model.model.rotary_emb.inv_freq.mul_(2)
    assert torch.equal(rotation.inv_freq, before)
