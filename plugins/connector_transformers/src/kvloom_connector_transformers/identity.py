"""Builds the KVSpec of a model: everything that decides the K and V of a token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from transformers import PreTrainedModel

from kvloom import KVSpec

from . import adapters
from .plain import PlainKV, plain_kv
from .weights import full_digest, sampled_digest

_BY_THE_WAY = {
    "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
    "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
"""Fields of a model's config that no K or V depends on, and that change without anyone noticing."""


def spec_of(model: Any) -> KVSpec:
    """The KVSpec of a transformers (or PEFT) model as it is now: weights, adapters, dtype, devices, autocast.

    Reads every weight (about 10 GB/s) unless they came from a hub and their commit is known; then it reads a sample.
    ValueError, with the layers' numbers, for a model whose KV can't be restored exactly or told apart safely.
    """
    return describe(model)[0]


def describe(model: Any) -> tuple[KVSpec, PlainKV]:
    """`spec_of`, and the observations behind it."""
    base = transformers_model(model)
    at_work = adapters.active_adapters(model)
    kv = plain_kv(base)
    text = base.config.get_text_config(decoder=True)
    commit = getattr(base.config, "_commit_hash", None)
    alike = kv.key_size == kv.value_size  # planes are of one size: else one has K and V of a token beside each other
    spec = KVSpec(
        model=base.name_or_path if commit else type(base).__name__,
        revision=", ".join(filter(None, (_revision(model, base, commit), kv.windows, _computed_by(base, kv)))),
        num_layers=kv.num_layers,
        num_kv_heads=kv.num_kv_heads,
        head_size=kv.key_size if alike else kv.key_size + kv.value_size,
        kv_planes=2 if alike else 1,
        dtype=str(kv.dtype).removeprefix("torch."),
        rope=_plain(getattr(text, "rope_parameters", None) or {}),
        adapters=at_work,
    )
    return spec, kv


def signature(model: Any) -> tuple[Any, ...]:
    """Equal to an earlier one as long as `spec_of` would say the same; costs milliseconds.

    A change of weights is seen by torch's own version counters and by a sample of each, because PEFT merges adapters
    past those counters.
    """
    base = transformers_model(model)
    tensors = list(_tensors(model))
    versions = tuple((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for _, tensor in tensors)
    return (
        hash(versions),
        sampled_digest(tensors, samples=32),
        adapters.state(model),
        _config_digest(base),
        _kernels(base),
    )


def transformers_model(model: Any) -> PreTrainedModel:
    """The model inside a PEFT wrapper, or the model itself. TypeError if there is none."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"model: expected a transformers model, got {type(inner).__name__}")
    return inner


def _revision(model: Any, base: PreTrainedModel, commit: str | None) -> str:
    """Commit, weights, config and code in words: `kvloom why` shows it when two runs don't share."""
    foreign = adapters.own_tensors(model)
    weights = [(adapters.base_name(name), tensor) for name, tensor in _tensors(model) if not name.startswith(foreign)]
    digest = (
        f"commit {commit}, sampled weights {sampled_digest(weights)}" if commit else f"weights {full_digest(weights)}"
    )
    return f"{digest}, config {_config_digest(base)}"


def _config_digest(base: PreTrainedModel) -> str:
    """A digest of the model's code, by name, and of its config as it is now: forwards read some fields at each call."""
    config = {key: value for key, value in base.config.to_dict().items() if key not in _BY_THE_WAY}
    code = f"{type(base).__module__}.{type(base).__qualname__}"
    return xxhash.xxh3_64_hexdigest((code + json.dumps(_plain(config), sort_keys=True)).encode())


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer, and what quantised weights keep besides; each once."""
    seen = set()
    for name, tensor in (*model.state_dict().items(), *model.named_buffers()):
        if isinstance(tensor, torch.Tensor):
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
            if place not in seen:
                seen.add(place)
                yield name, tensor


def _computed_by(model: PreTrainedModel, kv: PlainKV) -> str:
    """The parts that do not change the meaning of K and V, only their bits."""
    devices = "+".join(sorted({device.type for device in kv.devices}))
    return f"on {devices}: {', '.join(f'{name} {value}' for name, value in _kernels(model))}"


def _kernels(model: PreTrainedModel) -> tuple[tuple[str, str], ...]:
    text = model.config.get_text_config(decoder=True)
    kinds = sorted({tensor.device.type for tensor in model.parameters()})
    casts = [f"{kind} to {torch.get_autocast_dtype(kind)}" for kind in kinds if torch.is_autocast_enabled(kind)]
    return (
        ("attention", str(text._attn_implementation)),
        ("experts", str(getattr(text, "_experts_implementation", None))),
        ("matmul", torch.get_float32_matmul_precision()),
        ("autocast", " and ".join(casts) or "off"),
    )


def _plain(value: Any) -> Any:
    """JSON values."""
    return json.loads(json.dumps(value, sort_keys=True, default=str))
