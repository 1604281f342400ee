"""The weights and the configuration of a model, in words that are the same in every process that serves it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from kvloom import one_line

from .weights import file_digest, folder_digest, has_weights

log = logging.getLogger(__name__)

_ROPES = {"default", "llama3", "linear", "yarn", "deepseek_yarn", "mrope", "proportional"}
"""Rotations that depend on the model's configuration alone. LongRoPE, for example, has two, and takes the one for long
prompts as soon as `max_model_len` allows them."""
_BY_THE_WAY = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache"}
_NOT_OF_EMBEDDINGS = {
    "limit_per_prompt", "enable_mm_embeds", "allow_missing_mm_embeddings", "mm_encoder_only",
    "mm_processor_cache_gb", "mm_processor_cache_type", "mm_hasher_algorithm", "mm_shm_cache_max_object_size_mb",
    "mm_tensor_ipc", "mm_ipc_gpu_memory_gb", "skip_mm_profiling", "interleave_mm_strings",
    "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin",
}  # fmt: skip
"""Settings for images, video and audio that do not change a given one's embeddings."""
_NOT_COUNTED = {
    "model_config": {
        # in the revision, or in the identity of a layer
        "model", "model_weights", "hf_config", "hf_text_config", "hf_config_path", "hf_overrides", "config_format",
        "revision", "quantization", "quantization_config", "max_model_len", "multimodal_config", "seed", "dtype",
        # what becomes of prompts before the model, and of its output
        "runner", "convert", "tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init",
        "allowed_local_media_path", "allowed_media_domains", "enable_prompt_embeds", "io_processor_plugin",
        "renderer_num_workers", "pooler_config", "logits_processors", "max_logprobs", "logprobs_mode",
        "return_sampling_mask", "use_fp64_gumbel", "generation_config", "override_generation_config",
        "served_model_name",
        # how it is run and kept, and what loading it finds out
        "trust_remote_code", "hf_token", "is_submodel_config", "spec_target_max_model_len", "enforce_eager",
        "enable_trace_replay", "disable_cascade_attn", "disable_sliding_window", "allow_deprecated_quantization",
        "word_embeddings_untied_by_checkpoint", "enable_sleep_mode", "sleep_preserve_parameter_names",
        "sleep_mode_backend", "sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend", "enable_cumem_allocator",
    },
    "load_config": {
        "load_format", "download_dir", "safetensors_load_strategy", "safetensors_prefetch_num_threads",
        "safetensors_prefetch_block_size", "device", "use_tqdm_on_load", "pt_load_map_location",
    },
    "lora_config": {
        "max_lora_rank", "max_loras", "fully_sharded_loras", "max_cpu_loras", "specialize_active_lora",
        "enable_mixed_moe_lora_format", "enable_moe_shared_loras", "max_lora_cls_labels",
    },
    "attention_config": {  # kernels that round in another way, and sizes of theirs
        "backend", "backend_per_kind", "minimax_m3_msa_decode_backend", "mla_prefill_backend", "use_trtllm_attention",
        "flash_attn_version", "flash_attn_max_num_splits_for_cuda_graph", "tokenspeed_mla_min_split_kv",
        "tq_max_kv_splits_for_cuda_graph", "sparse_mla_force_mqa", "sparse_mla_prefill_workspace_factor",
        "hisparse_config", "flex_attn_block_m", "flex_attn_block_n", "flex_attn_q_block_size",
        "flex_attn_kv_block_size",
    },
    "kernel_config": {
        "ir_op_priority", "enable_flashinfer_autotune", "enable_rocm_segmented_attn_autotune",
        "enable_cutedsl_warmup", "enable_jit_warmup", "sparse_indexer_topk_backend",
    },
    "mamba_config": {"backend", "ssu_algorithm"},
    "engram_config": {"cpu_offload", "embedding_across_dp", "dp_shared_memory", "use_thp"},
}  # fmt: skip
"""By block of vLLM's configuration, fields that do not change what is computed for a token, or that count elsewhere.
All others count, those that a later vLLM adds, too."""


def name_of(model: Any) -> str:
    path = Path(str(model.model)).expanduser()
    return path.name if path.is_dir() else str(model.model)


def _local(model: Any, config: Any) -> Path | None:
    """The file or folder with the weights, if they are on this machine."""
    path = Path(str(model.model)).expanduser()
    if path.exists():
        return path
    folder = getattr(getattr(config, "load_config", None), "download_dir", None)
    return _snapshot(str(model.model), getattr(model, "revision", None), folder)


def _snapshot(repository: str, revision: str | None, folder: str | None) -> Path | None:
    """The folder of a repository in the hub's cache, as it is there now. Its name is the commit."""
    try:
        from huggingface_hub import try_to_load_from_cache

        for place in dict.fromkeys((folder, None)):
            found = try_to_load_from_cache(repository, "config.json", revision=revision, cache_dir=place)
            if isinstance(found, str):
                return Path(found).parent
    except Exception:
        return None
    return None


def revision_of(model: Any, config: Any) -> str:
    """Weights, configuration and how they are loaded, in words: `kvloom why` shows it when two runs don't share."""
    place = _local(model, config)
    load = getattr(config, "load_config", None)
    form = str(getattr(load, "load_format", "auto"))
    if "dummy" in form:
        weights = f"dummy weights of seed {getattr(model, 'seed', None)}"
    elif place is not None and has_weights(place):
        weights = f"weights {folder_digest(place) if place.is_dir() else file_digest(place)}"
    else:
        commit = place.name if place is not None else getattr(model, "revision", None)
        weights = f"revision {commit}"
        log.warning("the weights of %s are not available: KV is identified by name and revision only", model.model)
    fields = {key: value for key, value in _config_dict(model, place).items() if key not in _BY_THE_WAY}
    words = [weights, f"config {digest_of(plain_json(fields))}", f"quantization {getattr(model, 'quantization', None)}"]
    quantised = getattr(model, "quantization_config", None)
    if quantised is not None:
        words.append(f"quantization_config {digest_of(plain_json(quantised))}")
    if _depends_on_length(model):
        words.append(f"max_model_len {model.max_model_len}")
    for block in sorted(_NOT_COUNTED):
        settings = model if block == "model_config" else getattr(config, block, None)
        words += _counted(block, settings, str(getattr(model, "dtype", None)))
    more = getattr(config, "additional_config", None)
    if more:
        words.append(f"additional_config {digest_of(plain_json(more))}")
    media = _media(model)
    if media:
        words.append(f"media {digest_of(plain_json(media))}")
    return ", ".join(words)


def _counted(block: str, settings: Any, dtype: str) -> Iterator[str]:
    """Those that count, in words, as far as they are not the default, which may be the model's dtype."""
    for field in fields(settings) if is_dataclass(settings) else ():
        value = getattr(settings, field.name)
        if field.name not in _NOT_COUNTED[block] and value != _usual(field) and str(value) != dtype:
            text = json.dumps(value, sort_keys=True, default=str)
            yield f"{block}.{field.name} {text if len(text) <= 40 else digest_of(value)}"


def _usual(field: Any) -> Any:
    """The default of a field, also of one that pydantic describes. Some defaults cannot be had by making an object
    without arguments: vLLM's model then is one on a hub."""
    for source in (field.default, field):
        factory = getattr(source, "default_factory", None)
        if factory not in (None, MISSING):
            return factory()
    return getattr(field.default, "default", field.default)


def _media(model: Any) -> Mapping[str, Any]:
    """Settings that change the embeddings of images, video or audio, as far as they are not the default. vLLM's hash of
    an image covers those of its request alone."""
    media = getattr(model, "multimodal_config", None)
    if media is None:
        return {}
    usual = type(media)()
    found = {
        name: value for name, value in vars(media).items()
        if name not in _NOT_OF_EMBEDDINGS and value not in ({}, getattr(usual, name, None))
    }  # fmt: skip
    scales = Path(str(found.get("mm_encoder_fp8_scale_path", "")))
    return {**found, "scales": file_digest(scales)} if scales.is_file() else found


def _depends_on_length(model: Any) -> bool:
    """Return whether vLLM may compute other KV for the same tokens if `max_model_len` is another."""
    text = text_config(model)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [each for each in (rope, *rope.values()) if isinstance(each, Mapping)]
    types = {each.get("rope_type", each.get("type", "default")) for each in kinds}
    return bool(types - _ROPES) or hasattr(text, "attn_temperature_tuning")


def text_config(model: Any) -> Any:
    return getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)


def _config_dict(model: Any, place: Path | None) -> Mapping[str, Any]:
    """A model's configuration as its files have it: models change theirs while they load, which with several ranks only
    the ranks' processes see. place: see `_local`."""
    source = Path(getattr(model, "hf_config_path", None) or place or "")
    if place is not None and source.exists():
        try:
            read = _read_config(model, source)
            same = not callable(model.hf_overrides) or plain_json(_read_config(model, source)) == plain_json(read)
        except Exception as error:
            log.debug("the configuration of %s cannot be read again: %s", model.model, one_line(error))
        else:
            if not same:
                raise ValueError(
                    "hf_overrides: this function does not give the same configuration each time, and what vLLM "
                    "computes with is not known; write one that does, or a dict"
                )
            return read
    hf = getattr(model, "hf_config", None)
    return hf.to_dict() if hasattr(hf, "to_dict") else {}


def _read_config(model: Any, source: Path) -> Mapping[str, Any]:
    from vllm.transformers_utils.config import get_config

    overrides = model.hf_overrides
    function = overrides if callable(overrides) else None
    hf = get_config(
        str(source), model.trust_remote_code, code_revision=model.code_revision, config_format=model.config_format,
        hf_overrides_fn=function,
    )  # fmt: skip
    fields = hf.to_dict()
    # A function counts by its effects: its body may be another at the next start.
    words = {"architectures": fields.get("architectures")} if function else overrides
    return {**fields, "overrides": plain_json(words)}


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def plain_json(value: Any) -> Any:
    """JSON values."""
    return json.loads(json.dumps(value, sort_keys=True, default=str))
