"""Levels of the mode `cachegen`: how many each layer has, for K and for V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_BINS, MAX_BINS = 4, 63
_FINE, _COARSE = 32, 16
_FINE_KEY_LAYERS, _FINE_VALUE_LAYERS = 10, 2
"""Number of first layers with fine levels, in models of ten layers or more."""

_LAYERS = {
    "lmsys/longchat-7b-16k": 32,
    "meta-llama/Llama-3.1-8B-Instruct": 32,
    "meta-llama/Llama-3.1-70B-Instruct": 80,
    "meta-llama/Meta-Llama-3.1-8B-Instruct": 32,
    "mistralai/Mistral-7B-Instruct-v0.2": 32,
    "Qwen/Qwen-7B": 32,
    "THUDM/glm-4-9b-chat": 40,
}
"""By the names that models have on a hub."""


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """Layers `start_layer` (inclusive) to `end_layer` (exclusive) and their number of bins."""

    start_layer: int
    end_layer: int
    bins: int

    def __post_init__(self) -> None:
        if not 0 <= self.start_layer < self.end_layer:
            raise ValueError(f"layers {self.start_layer} to {self.end_layer} are no range of layers")
        if not MIN_BINS <= self.bins <= MAX_BINS:
            raise ValueError(f"bins must be from {MIN_BINS} to {MAX_BINS}, not {self.bins}")


@dataclass(frozen=True, slots=True)
class CacheGenConfig:
    """The bins of every layer of a model."""

    nlayers: int
    kspecs: Sequence[QuantizationSpec]
    vspecs: Sequence[QuantizationSpec]

    def __post_init__(self) -> None:
        for name in ("kspecs", "vspecs"):
            specs = tuple(sorted(getattr(self, name), key=lambda each: each.start_layer))
            ends = [0, *(each.end_layer for each in specs)]
            if [each.start_layer for each in specs] != ends[:-1] or ends[-1] != self.nlayers:
                raise ValueError(f"{name} must cover the layers 0 to {self.nlayers}, each once")
            object.__setattr__(self, name, specs)

    @classmethod
    def for_layers(cls, nlayers: int) -> CacheGenConfig:
        """Fine levels for the first layers, where errors do the most harm."""
        if nlayers < _FINE_KEY_LAYERS:
            return cls(nlayers, _two_kinds(nlayers, nlayers), _two_kinds(nlayers, nlayers))
        return cls(nlayers, _two_kinds(_FINE_KEY_LAYERS, nlayers), _two_kinds(_FINE_VALUE_LAYERS, nlayers))

    @classmethod
    def from_model_name(cls, model_name: str) -> CacheGenConfig:
        """The configuration for a model that is known by name, without a request. Raises ValueError for others."""
        if model_name not in _LAYERS:
            raise ValueError(
                f"the number of layers of {model_name!r} is not known; CacheGenConfig.for_layers takes it; known are "
                f"{', '.join(sorted(_LAYERS))}"
            )
        return cls.for_layers(_LAYERS[model_name])

    def by_layer(self) -> list[tuple[int, int]]:
        """For each layer the bins of K and of V."""
        keys, values = ([each.bins for each in specs for _ in range(each.start_layer, each.end_layer)]
                        for specs in (self.kspecs, self.vspecs))  # fmt: skip
        return list(zip(keys, values, strict=True))

    def __str__(self) -> str:
        of = [" ".join(f"{each.bins}:{each.end_layer}" for each in specs) for specs in (self.kspecs, self.vspecs)]
        return f"K {of[0]}, V {of[1]}"


def _two_kinds(fine: int, nlayers: int) -> tuple[QuantizationSpec, ...]:
    first = QuantizationSpec(0, fine, _FINE)
    return (first,) if fine == nlayers else (first, QuantizationSpec(fine, nlayers, _COARSE))
