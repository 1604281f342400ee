"""Recognises models that keep plain K and V, and describes their KV. Other models are refused by name.

Plain means: every layer can keep K and V of every token, shaped as in all layers, and the KV of a token depends on the
tokens up to it and on nothing else. Only then is a stored prefix the prefix of any prompt that starts with the same
tokens.
Layers with a window (sliding or chunked attention) are plain where transformers can record what leaves the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .restored import empty_cache

_WORDS = {
    "DynamicSlidingWindowLayer": "sliding-window or chunked attention, which this transformers cannot record",
    "DynamicIndexedLayer": "indexed sparse attention, which keeps indexer keys besides K and V",
    "LinearAttentionLayer": "linear attention, Mamba or convolution, which keeps the state after the last token only",
    "LinearAttentionAndFullAttentionLayer": "attention beside linear attention, which keeps its last state only",
    "LinearAttentionAndSlidingWindowAttentionLayer": "windows beside linear attention, which keeps its last state only",
    "DummyLayer": "layers without KV of their own (shared KV, or no attention)",
}
_MOVING_ROPE = ("dynamic", "longrope")
_PROBE_TOKENS = 4
_ROUNDING = 2.0**-8
"""Maximum change of KV that counts as rounding, relative to that of the token that was changed.

Random models leak 1e-2 and more where attention is bidirectional; rounding changes up to 5e-6 in float32.
"""
_Planes = tuple[torch.Tensor, torch.Tensor]
"""K `[rows, kv_heads, tokens, key_size]` and V `[rows, kv_heads, tokens, value_size]` of one layer."""


@dataclass(frozen=True, slots=True)
class PlainKV:
    """The observed content of a model's cache after a few tokens."""

    num_layers: int
    num_kv_heads: int
    key_size: int
    value_size: int
    """Elements of a head of K, and of V: they differ with MLA, whose latents transformers does not keep."""
    dtype: torch.dtype
    devices: tuple[torch.device, ...]
    """The device of each layer."""
    windows: str
    """The layers with a window and their windows in tokens, in words; empty if there are none."""


def plain_kv(model: PreTrainedModel) -> PlainKV:
    """Look at the model's cache, as it is run now (autocast included). ValueError if it isn't plain K and V."""
    config = model.config
    if config.is_encoder_decoder:
        raise _refusal(model, "it is an encoder-decoder: its cross-attention KV is not a prefix of anything")
    if getattr(model, "tp_size", None) not in (None, 1):
        raise _refusal(model, f"it is split over {model.tp_size} devices by tensor parallelism")
    text = config.get_text_config(decoder=True)
    if getattr(text, "use_bidirectional_attention", None):
        raise _refusal(model, "its attention is bidirectional: the KV of a token depends on later tokens")
    for rope in _ropes(getattr(text, "rope_parameters", None)):
        if any(word in str(rope.get("rope_type")) for word in _MOVING_ROPE):
            raise _refusal(model, f"rope type {rope['rope_type']!r} encodes positions by the length of the prompt")
    if any(hasattr(module, "rope_deltas") for module in model.modules()):
        raise _refusal(model, "multimodal rotary positions carry over from one call to the next (rope_deltas)")
    _refuse_layers(model, _layer_kinds(text))
    seen = _probe(model)
    if model._is_stateful:
        raise _refusal(model, "it keeps a recurrent state beside its cache")
    return seen


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """The rope parameters; of each layer type where they differ."""
    if isinstance(parameters, Mapping):
        if "rope_type" in parameters:
            yield parameters
        for value in parameters.values():
            yield from _ropes(value)


def _layer_kinds(config: Any) -> dict[int, str]:
    """The kinds of layers that do not keep plain K and V, by layer number."""
    kinds = {}
    plain: dict[str, type] = {"full_attention": DynamicLayer}
    if hasattr(DynamicCache, "activate_past_recording"):
        plain |= dict.fromkeys(("sliding_attention", "chunked_attention"), DynamicSlidingWindowLayer)
    layers = DynamicCache(config=config).layers
    for number, layer in enumerate(layers):
        if type(layer) not in plain.values():
            name = type(layer).__name__
            kinds[number] = f"{_WORDS.get(name, 'not plain K and V')} ({name})"
    # Earlier releases of transformers make a DynamicLayer of whatever they don't know, and none where KV is shared.
    for number, name in enumerate(getattr(config, "layer_types", None) or ()):
        if number >= len(layers) or type(layers[number]) is not plain.get(name):
            kinds.setdefault(number, f"{name} layers")
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    for number in range(config.num_hidden_layers - shared, config.num_hidden_layers):
        kinds.setdefault(number, "layers that share the KV of others")
    return kinds


def _refuse_layers(model: PreTrainedModel, kinds: Mapping[int, str]) -> None:
    by_kind: dict[str, list[int]] = {}
    for number, kind in kinds.items():
        by_kind.setdefault(kind, []).append(number)
    if by_kind:
        parts = [f"{_numbers(numbers)}: {kind}" for kind, numbers in by_kind.items()]
        raise _refusal(model, "not every layer keeps plain K and V; " + "; ".join(parts))


def _probe(model: PreTrainedModel) -> PlainKV:
    """Run a few tokens and look: config fields say neither what KV depends on nor its dtype under autocast."""
    first = _run(model, _PROBE_TOKENS - 1)
    _refuse_layers(
        model,
        {
            number: f"nothing in a DynamicCache after {_PROBE_TOKENS} tokens"
            for number, layer in enumerate(first.layers)
            if not isinstance(layer, DynamicLayer) or layer.get_seq_length() != _PROBE_TOKENS
        },
    )
    planes = _planes(first)
    if not planes:
        raise _refusal(model, "it does not use a DynamicCache")
    _refuse_layers(model, _odd_layers(planes))
    _refuse_leaks(model, planes, _planes(_run(model, _PROBE_TOKENS)))
    keys, values = planes[0]
    return PlainKV(
        num_layers=len(planes),
        num_kv_heads=keys.shape[1],
        key_size=keys.shape[3],
        value_size=values.shape[3],
        dtype=keys.dtype,
        devices=tuple(keys.device for keys, _ in planes),
        windows=_windows(model.config.get_text_config(decoder=True), first),
    )


def _windows(config: Any, cache: DynamicCache) -> str:
    by_window: dict[str, list[int]] = {}
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(cache.layers)
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicSlidingWindowLayer):
            by_window.setdefault(f"{kinds[number]} of {layer.sliding_window}", []).append(number)
    return ", ".join(f"{_numbers(numbers)} {window}" for window, numbers in by_window.items())


# Not inference mode: a mask or table that a model makes on its first run and keeps could never be trained with.
@torch.no_grad()
def _run(model: PreTrainedModel, last: int) -> DynamicCache:
    """The cache after tokens 0, 1, ... and `last`, `_PROBE_TOKENS` in all, counted from the middle of the vocabulary.

    At the start of a vocabulary are padding and other tokens that some models treat specially. Dropout is off.
    """
    cache = empty_cache(model.config)
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        numbers = torch.tensor([[*range(_PROBE_TOKENS - 1), last]], device=model.device)
        ids = (vocabulary // 2 + numbers) % vocabulary
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    except Exception as error:
        raise _refusal(model, f"it did not run {_PROBE_TOKENS} tokens with a DynamicCache: {error}") from error
    finally:
        for module in training:
            module.training = True
    return cache


def _planes(cache: DynamicCache) -> list[_Planes]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _odd_layers(planes: Sequence[_Planes]) -> dict[int, str]:
    """Layer number -> how its K and V differ from each other or from those of layer 0, of those where they do."""
    first = planes[0]
    odd = {}
    for number, (keys, values) in enumerate(planes):
        if keys.shape[:3] != values.shape[:3]:
            odd[number] = f"K is {_shape(keys)} and V is {_shape(values)}"
        elif (keys.shape, values.shape) != (first[0].shape, first[1].shape):
            odd[number] = f"K and V are {_shapes((keys, values))}, those of layer 0 {_shapes(first)}"
        elif {keys.dtype, values.dtype} != {first[0].dtype}:
            odd[number] = f"K is {keys.dtype} and V is {values.dtype}, those of layer 0 {first[0].dtype}"
    return odd


def _refuse_leaks(model: PreTrainedModel, one: Sequence[_Planes], other: Sequence[_Planes]) -> None:
    """ValueError if the KV of the tokens before the last changed with the last, from `one` run to the `other`."""
    tolerance = _ROUNDING if _rounds(model) else 0.0
    leaks, seen = [], False
    for number, (ours, theirs) in enumerate(zip(one, other, strict=True)):
        change = torch.cat([(a.float() - b.float()).cpu() for a, b in zip(ours, theirs, strict=True)], dim=-1)
        shared, last = float(change[..., :-1, :].norm()), float(change[..., -1:, :].norm())
        seen = seen or last > 0
        if not shared <= tolerance * last:  # NaN leaks too.
            leaks.append(number)
    if leaks:
        why = "config.is_decoder is False" if getattr(model.config, "is_decoder", None) is False else "not causal"
        raise _refusal(model, f"{_numbers(leaks)}: the KV of a token depends on later tokens ({why})")
    if not seen:
        raise _refusal(model, "different tokens have the same KV in every layer: its dependencies cannot be tested")


def _rounds(model: PreTrainedModel) -> bool:
    """Return whether sums may be rounded in another order when only the values differ.

    Not so on the CPU, where shapes decide the order: there, equal means equal. But the last token chooses the experts
    that earlier tokens share with it, and with them the shapes; and kernels of other devices promise nothing.
    """
    return any(parameter.device.type != "cpu" for parameter in model.parameters()) or any(
        word in name.lower() for name, _ in model.named_modules() for word in ("expert", "moe", "router")
    )


def _refusal(model: PreTrainedModel, reason: str) -> ValueError:
    return ValueError(f"{type(model).__name__}: its KV cannot be stored and restored exactly: {reason}")


def _shape(tensor: torch.Tensor) -> str:
    return f"{tensor.shape[1]} heads of {tensor.shape[3]}"


def _shapes(planes: _Planes) -> str:
    keys, values = map(_shape, planes)
    return keys if keys == values else f"{keys} and {values}"


def _numbers(numbers: Iterable[int]) -> str:
    """`layers 0-3, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    names = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'layer' if names.isdigit() else 'layers'} {names}"
