"""The spec of a model's KV, from what there is: a spec, a Hugging Face config, a name in its cache, numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloom import ConfigError
from kvloom_tools.model import read_json, spec_from

if TYPE_CHECKING:
    from kvloom import KVSpec

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_WIDTH = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True, slots=True)
class Given:
    """The options of the command line. They win over the model's files."""

    model: str | None = None
    layers: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    dtype: str | None = None
    option: str = "--spec"
    """The option that `model` was given with. `instead` names the options that can replace it."""
    instead: str = "--layers, --kv-heads, --head-size and --dtype"


def spec_of(given: Given) -> KVSpec:
    """The spec that `given` amounts to. Raises ConfigError with the option that is missing or wrong."""
    from kvloom import KVSpec

    numbers = {"num_layers": given.layers, "num_kv_heads": given.kv_heads, "head_size": given.head_size}
    said = {name: value for name, value in {**numbers, "dtype": given.dtype}.items() if value is not None}
    try:
        if given.model is not None:
            return replace(_of_model(given.model, given), **said)  # type: ignore[arg-type]
        if None in numbers.values():
            raise ConfigError(given.option, "give a spec, or all of --layers, --kv-heads and --head-size")
        return KVSpec(**{"model": "given", "dtype": "bfloat16", **said})  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(given.option, str(error)) from None


def _of_model(model: str, given: Given) -> KVSpec:
    path = _file_of(model, given.option)
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(str(path), "should be a KVSpec or a model's config.json")
    value = value.get("spec", value)
    try:
        if not isinstance(value, dict):
            raise ValueError(f"its spec is a {type(value).__name__} and no mapping")
        return spec_from(value if "head_size" in value and "num_layers" in value else _fields(model, value))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        problem = f"no {error} in it" if isinstance(error, KeyError) else str(error)
        raise ConfigError(str(path), f"{problem}; say {given.instead} instead") from None


def _file_of(model: str, option: str) -> Path:
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
    except (ImportError, ValueError):  # not installed; no name that the hub could have
        cached = None
    if not isinstance(cached, str):
        what = "a directory without config.json" if path.name == "config.json" else "neither a file nor a directory"
        raise ConfigError(option, f"{model!r} is {what}, and not in the hub's cache; download it")
    return Path(cached)


def _fields(model: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a KVSpec from a Hugging Face config. Raises KeyError with what is not there, ValueError for what is
    no number."""
    text = config.get("text_config") or config.get("llm_config") or config
    if not isinstance(text, Mapping):
        raise ValueError(f"its text_config is a {type(text).__name__} and no mapping")
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    fields = {
        "model": str(config.get("_name_or_path") or model),
        "num_layers": _first(text, _LAYERS),
        "dtype": "bfloat16" if dtype in (None, "auto") else str(dtype).removeprefix("torch."),
    }
    if text.get("kv_lora_rank"):  # a latent (MLA) cache: one vector for all heads
        return {
            **fields,
            "num_kv_heads": 1,
            "head_size": _first(text, ("kv_lora_rank",)) + _first(text, ("qk_rope_head_dim",)),
            "kv_planes": 1,
        }
    heads = _first(text, _HEADS)
    kv_heads = next((text[name] for name in _KV_HEADS if text.get(name)), None)
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        kv_heads = 1
    return {
        **fields,
        "num_kv_heads": kv_heads or heads,
        "head_size": text.get("head_dim") or _first(text, _WIDTH) // heads,
    }


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if value := config.get(name):
            if type(value) is not int or value < 1:
                raise ValueError(f"its {name} is no whole number of at least 1")
            return value
    raise KeyError(names[0])


_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15}


def quantity(text: str, option: str) -> float:
    """`8B` parameters, `400T` operations a second. Raises ConfigError with the option."""
    number = text.strip().rstrip("KMGBTPkmgbtp")
    suffix = text.strip()[len(number) :].upper()
    try:
        value = float(number) * _SUFFIXES[suffix]
    except (ValueError, KeyError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(option, f"{text!r} should be a number such as 8B or 400T")
    return value
