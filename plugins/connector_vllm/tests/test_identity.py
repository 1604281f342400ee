"""The identity of KV: different KV gets different keys, and unsupported KV is refused by name."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from identity_support import namespace
from vllm_fakes import BLOCK, SlidingWindowSpec, grouped, kv_cache_config, layer_spec, state_spec, vllm_config

from kvloom import ChunkKey, ConfigError, MemoryFormat
from kvloom_connector_vllm.configured import Settings
from kvloom_connector_vllm.identity import Adapters, identify, identify_groups
from kvloom_connector_vllm.names import Names, hash_of, owner_of
from kvloom_connector_vllm.scheduling.plan import Chunks, Owner

MEMORY = {"type": "memory", "capacity": "1MiB"}


def test_the_same_model_has_the_same_name_in_every_process(model: Path) -> None:
    assert namespace(vllm_config(str(model))) == namespace(vllm_config(str(model)))


@pytest.mark.parametrize("change", [
    "weights", "dtype", "block size", "layout", "heads", "layers", "cache dtype", "ranks", "rank", "version", "isa",
    "hash", "quantization", "quantised layers", "config", "longest prompt", "salt", "adapter", "reset",
    "seed of dummies", "additional settings",
])  # fmt: skip
def test_what_may_not_be_shared_has_another_name(model: Path, change: str) -> None:
    config, known, more = vllm_config(str(model)), kv_cache_config(), {}
    before = namespace(config, known, vllm="0.32.0", isa="vec")
    more = {"vllm": "0.32.0", "isa": "vec"}
    rank, owner = 0, Owner()
    if change == "weights":  # of the same size, and in the middle of the file
        data = bytearray((model / "model.safetensors").read_bytes())
        data[len(data) // 2 : len(data) // 2 + (1 << 17)] = b"\1" * (1 << 17)
        (model / "model.safetensors").write_bytes(data)
    elif change == "dtype":
        known = kv_cache_config(spec=layer_spec(dtype=torch.bfloat16))
    elif change == "block size":
        known = kv_cache_config(spec=layer_spec(block_size=2 * BLOCK))
    elif change == "layout":
        known = kv_cache_config(kv_cache_layout="LBNHC")
    elif change == "heads":
        known = kv_cache_config(spec=layer_spec(num_kv_heads=1))
    elif change == "layers":
        known = kv_cache_config(4)
    elif change == "cache dtype":
        config.cache_config.cache_dtype = "fp8"
    elif change in ("ranks", "rank"):
        config = vllm_config(str(model), tensor_parallel_size=2)
        before = namespace(config, known, **more) if change == "rank" else before
        rank = int(change == "rank")
    elif change == "version":
        more["vllm"] = "0.33.0"
    elif change == "isa":
        more["isa"] = "amx"
    elif change == "hash":
        config.cache_config.prefix_caching_hash_algo = "sha256_cbor"
    elif change == "quantization":
        config.model_config.quantization = "awq"
    elif change == "quantised layers":
        config.model_config.quantization_config = {"ignore": ["qkv_proj"]}
    elif change == "additional settings":
        config.additional_config = {"of a platform": True}
    elif change == "longest prompt":
        config.model_config.hf_text_config = SimpleNamespace(rope_parameters={"rope_type": "longrope"})
        config.model_config.max_model_len = 512
        before = namespace(config, known, **more)
        config.model_config.max_model_len = 2048
    elif change == "config":
        config.model_config.hf_config = SimpleNamespace(to_dict=lambda: {"layers": 3, "rope_scaling": 2})
    elif change == "salt":
        owner = owner_of("", "tenant")
    elif change == "adapter":
        owner = Owner("lora:1234")
    elif change == "reset":
        owner = Owner("", "", "1234")
    elif change == "seed of dummies":
        config.load_config.load_format = "dummy"
        before = namespace(config, known, **more)
        config.model_config.seed = 1
    assert namespace(config, known, rank=rank, owner=owner, **more) != before


def test_fields_that_change_nothing_do_not_count(model: Path) -> None:
    config = vllm_config(str(model))
    before = namespace(config)
    config.additional_config = {}
    assert namespace(config) == before
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: {"layers": 3, "transformers_version": "9"})
    assert namespace(config) == before


@pytest.mark.parametrize("rope", [None, {"rope_type": "yarn"}, {"full_attention": {"rope_type": "llama3"}}])
def test_the_longest_prompt_does_not_count_if_no_token_depends_on_it(model: Path, rope: Any) -> None:
    config = vllm_config(str(model))
    config.model_config.hf_text_config = SimpleNamespace(rope_parameters=rope)
    names = set()
    for config.model_config.max_model_len in (512, 2048):
        names.add(namespace(config))
    assert len(names) == 1


def test_latent_kv_is_the_same_on_every_rank(model: Path) -> None:
    class MLAAttentionSpec(type(layer_spec())):  # type: ignore[misc]
        """By its name it is vLLM's."""

    known = kv_cache_config(spec=MLAAttentionSpec(**{**vars(layer_spec()), "num_kv_heads": 1}))
    config = vllm_config(str(model), tensor_parallel_size=2)
    assert namespace(config, known, rank=0) == namespace(config, known, rank=1)
    for other in (layer_spec(num_kv_heads=1), MLAAttentionSpec(**{**vars(layer_spec()), "num_kv_heads": 2})):
        divided = kv_cache_config(spec=other)
        assert namespace(config, divided, rank=0) != namespace(config, divided, rank=1)


def test_an_adapter_is_known_by_the_weights_that_it_was_loaded_with(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    request = SimpleNamespace(lora_name="x", lora_int_id=1, lora_path=str(tmp_path), load_inplace=False)
    one = Adapters()
    first = one.of(request)
    assert first.startswith("x:") and one.of(None) == ""
    assert one.of(request) == first
    aside = tmp_path.with_name("aside")
    tmp_path.rename(aside)
    assert one.of(request) == first, "vLLM can load nothing else"
    aside.rename(tmp_path)
    times = weights.stat()
    weights.write_bytes(b"two")
    assert one.of(request) is None, "vLLM computes with either"
    weights.write_bytes(b"one")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert one.of(request) is None, "it may have loaded the others meanwhile"
    weights.write_bytes(b"two")
    again = SimpleNamespace(**{**vars(request), "lora_int_id": 2})
    assert one.of(again) not in (first, None)
    assert one.of(SimpleNamespace(**{**vars(request), "load_inplace": True})) == one.of(again) == one.of(request)
    weights.rename(tmp_path / "other.safetensors")
    assert one.of(request) is None
    os.mkfifo(tmp_path / "fifo")
    for number, nowhere in enumerate(("far/away", "no\0path", str(tmp_path / "fifo"), "/dev/zero"), 3):
        assert one.of(SimpleNamespace(**{**vars(request), "lora_int_id": number, "lora_path": nowhere})) is None


def test_images_that_are_numbered_are_refused(model: Path) -> None:
    config = vllm_config(str(model))
    config.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_gb=0)
    namespace(config)
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(ValueError, match="mm_processor_cache_gb"):
        namespace(config)


def test_a_cache_that_holds_other_numbers_than_vllm_says_is_refused(model: Path) -> None:
    config = vllm_config(str(model))
    config.cache_config.cache_dtype = "bfloat16"
    with pytest.raises(ValueError, match=r"kv_cache_dtype bfloat16 .*float32"):
        namespace(config)
    config.device_config.device_type = "cuda"
    namespace(config)
    config.device_config.device_type, config.model_config.dtype = "cpu", torch.bfloat16
    namespace(config)


def nothing(layer: Any) -> dict[str, str | int | bool]:
    return {}


def windowed(window: int = 20, **changes: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**vars(layer_spec(sliding_window=window, **changes)))


def test_each_group_of_layers_has_names_of_its_own(model: Path) -> None:
    config = vllm_config(str(model))
    chunks = Chunks(Owner(), 1, (bytes(32),))

    def names(*specs: Any) -> list[ChunkKey]:
        found = identify_groups(config, grouped(*specs), rank=0, about=nothing)
        return [
            Names(one.spec, one.geometry, MemoryFormat.KV_PAGES, chunk_tokens=8).segments(chunks)[0].key
            for one in found
        ]  # fmt: skip

    first = names(layer_spec(), windowed(), windowed())
    assert len({key.namespace for key in first}) == len({key.digest for key in first}) == 3
    assert {hash_of(key) for key in first} == {bytes(32)}
    assert not set(first[1:]) & set(names(layer_spec(), windowed(16), windowed(16)))
    assert names(windowed())[0].namespace != names(layer_spec(sliding_window=20))[0].namespace


def test_full_attention_comes_first_and_blocks_are_found_by_the_number_of_their_group(model: Path) -> None:
    whole = grouped(windowed(), layer_spec(block_size=2 * BLOCK), windowed(6))
    found = identify_groups(vllm_config(str(model)), whole, rank=0, about=nothing)
    assert [(one.group, one.window, one.layer_names) for one in found] == [
        (1, 0, ("layers.2", "layers.3")), (0, 20, ("layers.0", "layers.1")), (2, 6, ("layers.4", "layers.5")),
    ]  # fmt: skip
    assert {one.hash_tokens for one in found} == {BLOCK}
    read = Settings.read({"config": {"chunk_tokens": 8 * BLOCK, "tiers": [MEMORY]}}, ranks=1)
    assert [(group.chunk_tokens, group.window) for group in read.groups(found)] == [(32, 0), (16, 20), (4, 6)]
    at_once = Settings.read({"config": {"tiers": [MEMORY]}, "async_load": False}, ranks=1)
    with pytest.raises(ConfigError, match=r"async_load: .*windows"):
        at_once.groups(found)
    with pytest.raises(ConfigError, match="write 16"):
        Settings.read({"config": {"chunk_tokens": 5 * BLOCK, "tiers": [MEMORY]}}, ranks=1).groups(found)


def test_states_are_bytes_in_elements_of_the_models_dtype(model: Path) -> None:
    whole = grouped(state_spec(), layer_spec())
    attention, state = identify_groups(vllm_config(str(model)), whole, rank=0, about=nothing)
    assert (state.group, state.state, attention.state) == (0, True, False)
    assert state.spec.dtype == attention.spec.dtype == "float32"
    assert state.geometry.page_elements == 16, "62 bytes, and two of padding"
    (alone,) = identify_groups(vllm_config(str(model)), grouped(state_spec()), rank=0, about=nothing)
    assert (alone.spec.dtype, alone.geometry.page_elements) == ("uint8", 62)
    read = Settings.read({"config": {"chunk_tokens": 4 * BLOCK, "tiers": [MEMORY]}}, ranks=1)
    groups = read.groups((attention, state))
    assert [(group.chunk_tokens, group.state) for group in groups] == [(4 * BLOCK, False), (BLOCK, True)]
    assert read.by_request((alone,)), "vLLM has no state before the last"
    without = {"chunk_tokens": 4 * BLOCK, "save_tails": False, "tiers": [MEMORY]}
    with pytest.raises(ConfigError, match=r"save_tails: .*chunk_tokens: 4"):
        Settings.read({"config": without}, ranks=1).groups((attention, state))
    assert Settings.read({"config": {**without, "chunk_tokens": BLOCK}}, ranks=1).groups((attention, state))


@pytest.mark.parametrize("change", [
    {"shapes": ((5, 3), (4, 2))}, {"dtypes": (torch.float16, torch.float32)}, {"mamba_type": "GDN_ATTN"},
])  # fmt: skip
def test_states_of_another_form_have_another_name(model: Path, change: dict[str, Any]) -> None:
    names = []
    for spec in (state_spec(), state_spec(**change)):
        one = identify_groups(vllm_config(str(model)), grouped(layer_spec(), spec), rank=0, about=nothing)[1]
        names.append(Names(one.spec, one.geometry, MemoryFormat.KV_PAGES, chunk_tokens=BLOCK).namespace(Owner()))
    assert names[0] != names[1]


@pytest.mark.parametrize(("change", "said"), [
    ({"mamba_cache_mode": "all"}, "mamba_cache_mode all.*--mamba-cache-mode align"),
    ({"mamba_cache_mode": "none"}, "--enable-prefix-caching"), ({"num_speculative_blocks": 2}, "speculative"),
    ({"block_size": 2 * BLOCK}, "prefix-match-unit"),
])  # fmt: skip
def test_states_that_may_not_be_whole_are_refused(model: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        identify_groups(vllm_config(str(model)), grouped(layer_spec(), state_spec(**change)), rank=0, about=nothing)


def test_states_that_are_replayed_or_taken_apart_are_refused(model: Path) -> None:
    config, whole = vllm_config(str(model)), grouped(layer_spec(), state_spec())
    with pytest.raises(ValueError, match=r"connector: .*write vllm"):
        identify_groups(config, whole, rank=0, about=nothing, pages=False)
    config.cache_config.use_replayssm = True
    with pytest.raises(ValueError, match="use_replayssm"):
        identify_groups(config, whole, rank=0, about=nothing)


@pytest.mark.parametrize(("change", "said"), [
    ({"decode_context_parallel_size": 2}, "decode_context_parallel_size 2"),
    ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size 2"),
])  # fmt: skip
def test_parallelism_that_is_not_done_is_refused(model: Path, change: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        namespace(vllm_config(str(model), **change))


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "dflash", "medusa", "custom_class"])
def test_drafts_whose_kv_depends_on_more_than_their_tokens_are_refused(model: Path, method: str) -> None:
    config = vllm_config(str(model))
    config.speculative_config = SimpleNamespace(method=method)
    with pytest.raises(ValueError, match=rf"speculative_config\.method {method}: .*use draft_model, ngram"):
        namespace(config)


def test_a_draft_model_is_part_of_the_name(model: Path, tmp_path: Path) -> None:
    def named(method: str, weights: bytes = b"draft") -> str:
        draft = tmp_path / "draft"
        draft.mkdir(exist_ok=True)
        (draft / "model.safetensors").write_bytes(weights)
        config = vllm_config(str(model))
        other = vllm_config(str(draft)).model_config
        config.speculative_config = SimpleNamespace(method=method, draft_model_config=other)
        return namespace(config)

    assert named("ngram") == named("suffix", b"other") == namespace(vllm_config(str(model)))
    assert len({named("ngram"), named("draft_model"), named("draft_model", b"other")}) == 3


def test_stages_that_are_not_told_when_kv_is_there_are_refused(model: Path) -> None:
    config = vllm_config(str(model), pipeline_parallel_size=2)
    namespace(config)
    config.speculative_config = SimpleNamespace(method="ngram")
    with pytest.raises(ValueError, match="pipeline_parallel_size with speculative_config"):
        namespace(config)


def test_a_stage_that_has_none_of_a_groups_layers_keeps_nothing_of_it(model: Path) -> None:
    whole = grouped(layer_spec(), windowed())
    whole.kv_cache_groups[1].layer_names = []
    full, window = identify_groups(vllm_config(str(model)), whole, rank=0, about=nothing)
    assert len(full.of_rank(0)) == 1 and window.of_rank(0) == [] and window.layer_names == ()


def test_models_that_are_not_done_are_refused(model: Path) -> None:
    config = vllm_config(str(model))
    for name in ("RSWASpec", "SlidingWindowMLASpec", "SinkFullAttentionSpec"):
        derived = type(name, (type(layer_spec()),), {})
        with pytest.raises(ValueError, match=f"{name}.*OffloadingConnector"):
            identify_groups(config, grouped(layer_spec(), derived(**vars(layer_spec()))), rank=0, about=nothing)
    with pytest.raises(ValueError, match="one dtype"):
        identify_groups(config, grouped(layer_spec(), windowed(dtype=torch.bfloat16)), rank=0, about=nothing)
    with pytest.raises(ValueError, match="not causal"):
        namespace(config, kv_cache_config(spec=layer_spec(non_causal=True)))
    quantised = kv_cache_config(spec=layer_spec(kv_quant_mode=SimpleNamespace(name="INT8_PER_TOKEN_HEAD")))
    with pytest.raises(ValueError, match="INT8_PER_TOKEN_HEAD"):
        namespace(config, quantised)
    with pytest.raises(ValueError, match="LHBNC"):
        namespace(config, kv_cache_config(kv_cache_layout="LHBNC"))
    draft = kv_cache_config()
    draft.kv_cache_groups[0].is_eagle_group = True
    with pytest.raises(ValueError, match="speculative"):
        namespace(config, draft)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    with pytest.raises(ValueError, match="xxhash"):
        namespace(config)


def test_keys_say_where_in_the_sequence_a_chunk_is(model: Path) -> None:
    one = identify(vllm_config(str(model)), kv_cache_config(), rank=0, about={})
    segments = Names(one.spec, one.geometry, MemoryFormat.KV_PAGES, chunk_tokens=8).segments(
        Chunks(Owner(), 2, (b"a" * 32, b"b" * 32))
    )
    assert [(segment.start, segment.end, segment.key.depth) for segment in segments] == [(16, 24, 2), (24, 32, 3)]


def test_k_and_v_are_the_same_whoever_laid_out_the_pages(model: Path) -> None:
    def name(layout: str, pages: bool, **about: Any) -> str:
        known = kv_cache_config(kv_cache_layout=layout)
        one = identify(vllm_config(str(model)), known, rank=0, about=about, pages=pages)
        return Names(one.spec, one.geometry, MemoryFormat.KV_BLOB, chunk_tokens=8).namespace(Owner())

    assert name("LBHNC", False, vllm="0.32.0") == name("LBNHC", False, vllm="0.33.0")
    assert name("LBHNC", True) != name("LBNHC", True)


def test_a_salt_of_any_length_takes_little_of_what_is_kept_and_sent() -> None:
    owner = owner_of("", "\ud800" * 100_000)
    assert len(pickle.dumps(owner)) < 200 and owner != owner_of("", "x") != owner_of("", "")
    assert owner_of("", "") == Owner()
