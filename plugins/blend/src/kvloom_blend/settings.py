"""The settings of executors and retrievers. Imports no torch, so that a configuration is checked without it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, model_validator

from kvloom import Config

Metric = Literal["v", "k", "kv"]


class RatioConfig(Config):
    """Settings of an executor with a budget."""

    recompute_ratio: float = Field(default=0.15, ge=0.0, le=1.0, strict=True)
    """The share of the retrieved tokens that is computed again."""
    verdict: Path | None = None
    """A file of `kvloom blend verify --tasks`: without a good verdict on these settings and this model, no engine
    opens."""


class EpicConfig(RatioConfig):
    tokens_per_passage: int | None = Field(default=None, ge=0)
    """Number of tokens of each passage, instead of a share of all tokens."""


class DeviationConfig(RatioConfig):
    """Settings of `cacheblend` and `hybrid`."""

    check_layers: tuple[int, ...] = (1,)
    """Layers in which tokens are compared, from 0; up to the first of them every token is computed."""
    metric: Metric = "v"
    """Compared are V, K, or both, each in relation to its size."""

    @model_validator(mode="after")
    def _layers_in_order(self) -> DeviationConfig:
        layers = self.check_layers
        if not layers or layers[0] < 0 or any(a >= b for a, b in pairwise(layers)):
            raise ValueError(f"check_layers: {list(layers)}; name at least one layer, from 0, in ascending order")
        return self


class CacheBlendConfig(DeviationConfig):
    gradual: float = Field(default=3.0, ge=1.0, strict=True)
    """With several check layers, how many times `recompute_ratio` is kept in the first; the share falls evenly, by the
    same factor from one to the next, to `recompute_ratio` in the last (CacheBlend's gradual filtering)."""

    def ratios(self) -> dict[int, float]:
        """The share of the candidates that is kept in each check layer."""
        steps = len(self.check_layers) - 1
        return {
            layer: min(1.0, self.recompute_ratio * (self.gradual ** (1 - step / steps) if steps else 1.0))
            for step, layer in enumerate(self.check_layers)
        }


class HybridConfig(DeviationConfig):
    attention_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """The weight of the question's attention in the geometric mean that tokens are ranked by; the rest is the weight of
    the deviation. 0 ranks by deviation alone, and costs no pass of the question."""

    @model_validator(mode="after")
    def _one_layer(self) -> HybridConfig:
        if len(self.check_layers) != 1:
            raise ValueError(f"check_layers: {list(self.check_layers)}; hybrid compares in one layer")
        return self


class PassageConfig(Config):
    lead: tuple[NonNegativeInt, ...] = ()
    """Token ids that are put before a passage when it is computed alone: the BOS, or a prefix that all prompts share.
    Without one, each passage begins like a prompt, and its first tokens draw attention that they should not."""
    prefix: bool = True
    """Use the stored prefix of the prompt, which is exact."""
    in_context: bool = True
    """Keep passages of prompts that were computed as a whole, and prefer them to passages that were computed alone:
    first what stood behind the same passage as now, then what stood behind any other."""


def _as_tokens(value: object) -> object:
    tokens = (value,) if type(value) is int else value
    if isinstance(tokens, (list, tuple)) and not (tokens and all(type(one) is int and one >= 0 for one in tokens)):
        raise ValueError("name the token id that stands between passages, or several in a row, such as [198]")
    return tokens


Separator = Annotated[tuple[int, ...], BeforeValidator(_as_tokens)]
"""One token id, or several in a row."""


class SeparatorConfig(PassageConfig):
    separator: Separator = Field(default_factory=tuple, validate_default=True)
    """Token ids, in order, that stand between passages."""


class FixedConfig(PassageConfig):
    piece_tokens: int = Field(default=64, ge=16, le=4096)
    """Tokens of a piece."""
    most_pieces: int = Field(default=1 << 20, ge=1)
    """Maximum number of remembered pieces; the oldest are forgotten first."""


class ContentConfig(PassageConfig):
    piece_tokens: int = Field(default=32, ge=16, le=4096)
    """Tokens of a piece, on average. None is shorter than a quarter of it, or longer than four times."""
