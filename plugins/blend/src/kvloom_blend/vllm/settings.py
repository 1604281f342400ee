"""Parses `--kv-transfer-config`, and refuses by name, before anything runs, what cannot work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvloom import ConfigError, EngineConfig

WHERE = "kv_connector_extra_config"
_KEYS = ("config", "least_found")
_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "pt")
"""Ways of loading weights that are in files as transformers has them."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`kv_connector_extra_config`."""

    engine: EngineConfig
    least_found: float
    """Minimum share of a prompt that must be stored; below it vLLM computes the prompt."""
    min_tokens: int

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Settings:
        """Raises ConfigError, with each path of what cannot work and what to do."""
        known = ", ".join(_KEYS)
        problems = [(f"{WHERE}.{name}", f"unknown key; there are {known}") for name in sorted(set(extra) - set(_KEYS))]
        if "config" not in extra:
            text = "missing: the path of a YAML file (docs/use/blend-vllm.md has one)"
            problems.append((f"{WHERE}.config", text))
        least = extra.get("least_found", 0.5)
        if isinstance(least, bool) or not isinstance(least, int | float) or not 0 < least <= 1:
            problems.append((f"{WHERE}.least_found", f"expected a share above 0, up to 1, got {least!r}"))
        try:
            config = EngineConfig.load(extra.get("config", {}))
        except ConfigError as error:
            raise ConfigError.of_all([*problems, (error.path, error.problem)]) from None
        if config.blend is None and "config" in extra:
            problems.append(("blend", "is not there; name an executor and a retriever"))
        if problems or config.blend is None:
            raise ConfigError.of_all(problems)
        return cls(config, float(least), config.blend.min_tokens)


def refuse(config: Any) -> None:
    """Raise ValueError, naming the argument and the remedy, for a `VllmConfig` that blending cannot work under."""
    for problem in (_exactness(config), _ranks(config.parallel_config), _twin(config), _rest(config)):
        if problem:
            raise ValueError(f"KVLoomBlendConnector: {problem}")


def _exactness(config: Any) -> str | None:
    if config.cache_config.enable_prefix_caching:
        return (
            "prefix caching is on: blended KV is approximate, and vLLM would give it to other requests under hashes "
            "that promise exact prefixes; start with --no-enable-prefix-caching"
        )
    transfer = config.kv_transfer_config
    if not transfer.is_kv_consumer:
        return f"kv_role {transfer.kv_role!r}: blended KV is not sent to anyone; write kv_consumer"
    if transfer.kv_load_failure_policy != "recompute":
        return (
            f"kv_load_failure_policy {transfer.kv_load_failure_policy!r} ends a request whose blending fails; write "
            '"kv_load_failure_policy": "recompute", and vLLM computes it'
        )
    return None


def _ranks(parallel: Any) -> str | None:
    reasons = {
        "tensor_parallel_size": "each rank has a part of the heads, and the twin computes all of them",
        "pipeline_parallel_size": "each rank has a part of the layers, and the twin computes all of them",
        "decode_context_parallel_size": "the tokens of a block are spread over ranks",
        "prefill_context_parallel_size": "the tokens of a block are spread over ranks",
    }
    for name, reason in reasons.items():
        if getattr(parallel, name, 1) > 1:
            return f"{name} {getattr(parallel, name)}: {reason}; use 1"
    return None


def _twin(config: Any) -> str | None:
    """The reason why transformers cannot load vLLM's weights; None if it can."""
    model, form = config.model_config, str(getattr(config.load_config, "load_format", "auto"))
    if model.quantization:
        return f"quantization {model.quantization!r}: transformers would compute other KV; use the model as it is"
    if form not in _FORMATS:
        return f"load_format {form!r}: transformers cannot load the same weights; use one of {', '.join(_FORMATS)}"
    if model.hf_overrides:
        return "hf_overrides: transformers loads the model without them; change the model's config.json instead"
    return None


def _rest(config: Any) -> str | None:
    if getattr(config, "speculative_config", None) is not None:
        return "speculative decoding: the drafter has no KV of a prompt that vLLM did not compute; remove it"
    return None
