"""LMCache's blending as a block `blend`, and the connector that blends."""

from __future__ import annotations

from typing import Any

from kvloom import ConfigError
from kvloom_lmcache.draft import Draft, shown
from kvloom_lmcache.fields import MAPPED

FIELDS = tuple(name for name in MAPPED if "blend" in name)
_SEPARATOR = "blend.retriever.separator: the token ids of blend_special_str: give --tokenizer, or write them"
_IN_VLLM = (
    "the block `blend`, with `connector: transformers`: vLLM blends by KVLoomBlendConnector, which reads this file, "
    "not by KVLoomConnector, which refuses it (docs/use/blend-vllm.md)"
)
_OF_VLLM = ("vllm", "vllm_blob", "vllm_offload")


def add_blending(draft: Draft) -> None:
    """The fields that speak of blending. Raises ConfigError for values of another type."""
    if not draft.flag("enable_blending"):
        for name in FIELDS:
            draft.say(name, "not needed", "blending is off")
        return
    block = _block(draft)
    if not draft.separator:
        for name in FIELDS:
            draft.say(name, "no counterpart", _SEPARATOR if name == "enable_blending" else "goes with enable_blending")
        return
    config = draft.done.config
    config["blend"] = {**block, "retriever": {"type": "separator", "separator": list(draft.separator)}}
    in_vllm = config["connector"] in _OF_VLLM
    if in_vllm:
        config["connector"] = "transformers"
        draft.done.sources["connector"] = ["enable_blending"]
    for name in FIELDS:
        text = _IN_VLLM if in_vllm and name == "enable_blending" else "the block `blend`"
        draft.say(name, "mapped", text, part="blend")


def _block(draft: Draft) -> dict[str, Any]:
    """Make the `blend` block. LMCache uses the first of several ratios."""
    ratios = _numbers(draft, "blend_recompute_ratios") or _numbers(draft, "blend_recompute_ratio")
    layers = _numbers(draft, "blend_check_layers")
    least = draft.values["blend_min_tokens"]
    if type(least) is not int or least < 0:
        raise ConfigError("blend_min_tokens", f"should be a whole number from 0, not {shown(least)}")
    if any(layer != int(layer) for layer in layers):
        raise ConfigError("blend_check_layers", "should be numbers of layers, from 0")
    block: dict[str, Any] = {"executor": "cacheblend"}
    if ratios:
        block["recompute_ratio"] = ratios[0]
    if layers:
        block["check_layers"] = [int(layer) for layer in layers]
    if least != MAPPED["blend_min_tokens"]:
        block["min_tokens"] = least
    return block


def _numbers(draft: Draft, name: str) -> list[float]:
    """One or several, as a list or as text with commas between them."""
    value = draft.values[name]
    if value is None:
        return []
    several = value if isinstance(value, list) else value.split(",") if isinstance(value, str) else [value]
    try:
        found = [float(one) for one in several if not isinstance(one, bool)]
    except (TypeError, ValueError, OverflowError):
        found = []
    if not found or len(found) != len(several) or not all(0 <= one <= 1e6 for one in found):
        raise ConfigError(name, f"should be a number from 0, or several, not {shown(value)}")
    return found
