"""PEFT adapters: which are at work, a digest of each, and which tensors are theirs and not the base model's.

PEFT is not imported: its layers are recognised by their attributes, whether the model is a `PeftModel` or loaded its
adapters through transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from .weights import NamedTensors, full_digest

_PATHS = ("base_model.model.", ".base_layer", ".original_module")
_BY_THE_WAY = ("base_model_name_or_path", "inference_mode", "revision", "task_type", "auto_mapping")


def base_name(name: str) -> str:
    """A tensor's name without PEFT's wrappers, so that a bare and a wrapped model agree."""
    for path in _PATHS:
        name = name.replace(path, "")
    return name


def state(model: torch.nn.Module) -> tuple[Any, ...]:
    """The state of the adapters that can change between two calls, without their weights; cheap, and comparable."""
    return tuple(
        (name, layer.disable_adapters, tuple(layer.active_adapters), tuple(layer.merged_adapters), _settings(layer))
        for name, layer in _layers(model)
    )


def active_adapters(model: torch.nn.Module) -> tuple[str, ...]:
    """`type:digest` of each adapter at work, in the order in which they are applied.

    The digest covers its config, its weights and its scaling in every layer. ValueError for one whose effect on a
    token's KV depends on more than the tokens up to it.
    """
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    _refuse(model, configs)
    by_adapter: dict[str, list[tuple[str, Any]]] = {}
    for name, layer in _layers(model):
        if layer.disable_adapters and layer.merged_adapters:
            raise ValueError(f"{name}: adapters are merged and disabled at the same time; unmerge them first")
        if layer.disable_adapters or layer.merged_adapters:
            continue
        for adapter in layer.active_adapters:
            for attribute, container in _containers(layer):
                if adapter in container:
                    entry = (f"{base_name(name)}.{attribute}", container[adapter])
                    by_adapter.setdefault(adapter, []).append(entry)
    return tuple(
        f"{_kind(configs.get(adapter))}:{_digest(configs.get(adapter), parts)}" for adapter, parts in by_adapter.items()
    )


def own_tensors(model: torch.nn.Module) -> tuple[str, ...]:
    """Prefixes of the names of every adapter's tensors, at work or not."""
    return tuple(
        f"{name}.{attribute}.{adapter}"
        for name, layer in _layers(model)
        for attribute, container in _containers(layer)
        for adapter in container
    )


def _refuse(model: torch.nn.Module, configs: Mapping[str, Any]) -> None:
    # Prompt learning has no layers of its own: a PeftModel says what is active; a transformers model has a method.
    names = getattr(model, "active_adapters", None)
    if not isinstance(names, list):
        names = [name for _, layer in _layers(model) for name in layer.active_adapters]
    for name in dict.fromkeys(names):
        config = configs.get(name)
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(f"adapter {name!r}: {_kind(config)} puts virtual tokens before the prompt")
        if _kind(config) == "xlora":
            raise ValueError(f"adapter {name!r}: X-LoRA weighs its adapters by the whole prompt")
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError(f"adapter {name!r}: aLoRA starts at its invocation tokens, wherever they are")


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if getattr(type(module), "adapter_layer_names", None):
            yield name, module


def _containers(layer: Any) -> Iterator[tuple[str, Any]]:
    """The values that the layer keeps by adapter: modules, tensors, numbers."""
    for attribute in (*layer.adapter_layer_names, *layer.other_param_names):
        container = getattr(layer, attribute, None)
        if hasattr(container, "keys"):
            yield attribute, container


def _settings(layer: Any) -> tuple[str, ...]:
    """Everything by adapter that is not a tensor: its scaling above all."""
    return tuple(
        f"{attribute} {key} {value!r}"
        for attribute, container in _containers(layer)
        for key, value in container.items()
        if not isinstance(value, torch.Tensor | torch.nn.Module)
    )


def _digest(config: Any, parts: list[tuple[str, Any]]) -> str:
    fields = {key: value for key, value in (config.to_dict() if config else {}).items() if key not in _BY_THE_WAY}
    text = json.dumps(fields, sort_keys=True, default=_plain)
    tensors: list[tuple[str, torch.Tensor]] = []
    for name, value in parts:
        if isinstance(value, torch.Tensor):
            tensors.append((name, value))
        elif isinstance(value, torch.nn.Module):
            tensors.extend(_of_module(name, value))
        else:
            text += f"\n{name} {value!r}"
    return xxhash.xxh3_128_hexdigest((text + full_digest(tensors)).encode())


def _of_module(name: str, module: torch.nn.Module) -> NamedTensors:
    for key, tensor in module.state_dict().items():
        yield f"{name}.{key}", tensor


def _kind(config: Any) -> str:
    kind = getattr(config, "peft_type", "adapter")
    return str(getattr(kind, "value", kind)).lower()


def _plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)
