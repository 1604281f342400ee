"""Checks calls of `generate`: those that stored KV cannot serve are refused by name, before anything runs.

KV is found by token ids, so the KV must depend on nothing else: no pixels, embeddings, padding, or positions from the
caller. An argument that is not known to leave the prompt's KV alone is refused, so that a new option of transformers is
an error here and not another prompt's KV.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

_ARGUMENTS = {
    "attention_mask", "input_ids", "logits_processor", "negative_prompt_attention_mask", "negative_prompt_ids",
    "prefix_allowed_tokens_fn", "stopping_criteria", "streamer", "synced_gpus", "tokenizer",
}  # fmt: skip
"""Arguments of `generate`, besides the fields of GenerationConfig, that leave the KV of the prompt alone."""

_NO_IDS = "it is not made of token ids, and KV is found by token ids"
_POSITIONS = "stored KV is at positions 0, 1, 2 and so on"
_CACHE = "CachedModel passes a DynamicCache of its own; call the model itself, or use Engine with your cache"
_SPECULATION = "speculative decoding rolls the cache back and forth"

_REFUSED = {
    "adapter_names": "rows with different adapters have KV of different models; call once for each",
    "assistant_model": _SPECULATION,
    "cache_params": _CACHE,
    "cache_position": _POSITIONS,
    "custom_generate": "a decoding loop of your own may do anything to the cache",
    "decoder_input_ids": "there is no decoder apart from the model",
    "encoder_outputs": "there is no encoder apart from the model",
    "inputs_embeds": _NO_IDS,
    "past_key_values": _CACHE,
    "position_ids": _POSITIONS,
    "token_type_ids": "token types change the KV of a token, and keys do not cover them",
}


class _Setting(NamedTuple):
    allowed: Callable[[Any], bool]
    why: str


_SETTINGS = {
    "assistant_early_exit": _Setting(lambda value: not value, _SPECULATION),
    "cache_implementation": _Setting(lambda value: value is None, _CACHE),
    "num_beams": _Setting(lambda value: value in (None, 1), "beams reorder the rows of the cache"),
    "num_return_sequences": _Setting(lambda value: value in (None, 1), "the rows of the cache would be copies"),
    "prompt_lookup_num_tokens": _Setting(lambda value: value is None, _SPECULATION),
    "speculation_type": _Setting(lambda value: value is None, _SPECULATION),
    "token_healing": _Setting(lambda value: not value, "it changes the prompt after its KV was looked up"),
    "use_cache": _Setting(
        lambda value: value is not False, "without a cache there is no KV to keep; call the model itself"
    ),
    "use_mtp": _Setting(lambda value: not value, _SPECULATION),
}


def check_call(
    model: Any, inputs: Any, generation_config: GenerationConfig | None, kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """The prompt, `[rows, tokens]`, as passed. ValueError, naming the argument, for a call that can't be served."""
    if model.training or any(_drops(module) for module in model.modules()):
        raise ValueError("model: it is in training mode, where dropout makes KV random; call model.eval()")
    given = {name: value for name, value in kwargs.items() if value is not None}
    for name in given:
        if name in _REFUSED:
            raise ValueError(f"{name}: {_REFUSED[name]}")
        if name not in _ARGUMENTS and not hasattr(_DEFAULTS, name):
            raise ValueError(f"{name}: {_NO_IDS}" if _multimodal(name) else f"{name}: {_UNKNOWN}")
    _check_settings(model, generation_config, given)
    ids = _check_ids(inputs, given.get("input_ids"))
    _check_padding(ids, given.get("attention_mask"), _setting("pad_token_id", model, generation_config, given))
    return ids


_DEFAULTS = GenerationConfig()
_UNKNOWN = "kvloom does not know this argument, nor whether it changes the KV of the prompt; call the model itself"


def _check_settings(model: Any, config: GenerationConfig | None, given: Mapping[str, Any]) -> None:
    for name, setting in _SETTINGS.items():
        value = _setting(name, model, config, given)
        if not setting.allowed(value):
            raise ValueError(f"{name}: {value!r} cannot be served from stored KV: {setting.why}")
    merged = GenerationConfig()
    merged.update(**{name: _setting(name, model, config, given) for name in vars(merged) if not name.startswith("_")})
    mode = merged.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"generation_config: {mode.value} cannot be served from stored KV, only greedy search and sampling"
        )


def _setting(name: str, model: Any, config: GenerationConfig | None, given: Mapping[str, Any]) -> Any:
    """A field as `generate` will see it: of the call, else of the config passed, else of the model's."""
    for value in (given.get(name), getattr(config, name, None), getattr(model.generation_config, name, None)):
        if value is not None:
            return value
    return None


def _check_ids(inputs: Any, input_ids: Any) -> torch.Tensor:
    if inputs is not None and input_ids is not None:
        raise ValueError("input_ids: passed twice, by position and by name")
    ids = inputs if input_ids is None else input_ids
    if not isinstance(ids, torch.Tensor):
        raise ValueError(f"input_ids: expected a [rows, tokens] tensor of token ids, got {type(ids).__name__}")
    if ids.dim() != 2 or ids.numel() == 0:
        raise ValueError(f"input_ids: expected [rows, tokens], neither of them 0, got {tuple(ids.shape)}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"input_ids: expected token ids, got {ids.dtype}")
    return ids


def _check_padding(ids: torch.Tensor, mask: Any, pad_token_id: Any) -> None:
    if mask is None:
        # transformers would take these for padding and mask them.
        if pad_token_id is not None and bool((ids == pad_token_id).any()):
            raise ValueError(
                "attention_mask: missing, though input_ids holds the padding token; pass ones if it is text"
            )
        return
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        raise ValueError(f"attention_mask: expected a tensor of shape {tuple(ids.shape)} like input_ids")
    if not bool((mask == 1).all()):
        raise ValueError(
            "attention_mask: padding moves the positions of a row; pass rows of equal length, or one by one"
        )


def _multimodal(name: str) -> bool:
    return any(word in name for word in ("pixel", "image", "video", "audio", "feature", "input_values", "mm_", "grid"))


def _drops(module: torch.nn.Module) -> bool:
    return module.training and isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0
