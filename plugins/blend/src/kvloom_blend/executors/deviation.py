"""Executors that select by deviation: the distance between a token's fresh KV and its retrieved KV."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, cast

import torch
from pydantic import Field, model_validator

from kvloom import BlendExecutor, BlendRequest, BlendSession, ConfigError, KVSpec

from .session import Layer, SelectingSession
from .static import RatioConfig, attention_of

Metric = Literal["v", "k", "kv"]


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


def check_layers(config: DeviationConfig, spec: KVSpec | None) -> None:
    """Raise ConfigError if the model has fewer layers."""
    if spec is not None and config.check_layers[-1] >= spec.num_layers:
        raise ConfigError(
            "check_layers", f"names layer {config.check_layers[-1]}; the model has {spec.num_layers}, from 0"
        )


def deviation(layer: Layer, valid: torch.Tensor, metric: Metric) -> torch.Tensor:
    """The mean square of fresh less retrieved KV for each token: float32 `[batch]`, on CPU.

    It is -inf for tokens that cannot be compared, because they are not valid or were left out.
    """
    dim = layer.token_dim % layer.fresh_v.dim()
    going = layer.going
    comparable = valid[going]
    rows = going[comparable].to(layer.fresh_v.device)
    local = comparable.nonzero().flatten().to(layer.fresh_v.device)
    everyone = len(rows) == len(valid)
    total = torch.zeros(len(local), device=layer.fresh_v.device)
    for name, fresh, retrieved in (
        ("v", layer.fresh_v, layer.retrieved_v),
        ("k", layer.fresh_k, layer.retrieved_k),
    ):
        if name not in metric or not len(local):
            continue
        here = fresh if everyone else fresh.index_select(dim, local)
        there = retrieved if everyone else retrieved.index_select(dim, rows)
        squares = (here.float() - there.float()).square_()
        scale = here.float().square().mean().clamp_min(1e-12) if len(metric) > 1 else 1.0
        total += squares.movedim(dim, 0).flatten(1).mean(1) / scale
    scores = torch.full((len(valid),), float("-inf"))
    scores[rows.cpu()] = total.cpu()
    return scores


class CacheBlendSession(SelectingSession):
    """Compares in the check layers; before the first, all that is not exact is computed."""

    def __init__(self, request: BlendRequest, config: CacheBlendConfig) -> None:
        super().__init__(request)
        self._metric = config.metric
        self._ratios = config.ratios()

    def selects_in(self, layer_id: int) -> bool:
        return layer_id in self._ratios

    def choose(self, layer: Layer) -> torch.Tensor | None:
        ratio = self._ratios.get(layer.number)
        if ratio is not None:
            return self.largest(
                deviation(layer, self.candidates, self._metric), ratio, among=_mask(layer.going, len(self.valid))
            )
        return self.candidates if layer.number == 0 else None


class CacheBlendExecutor(BlendExecutor):
    """`cacheblend`: computes the first layers for every token, and continues with those whose KV differs most."""

    type = "cacheblend"
    Config = CacheBlendConfig

    def __init__(self, config: CacheBlendConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        check_layers(config, spec)

    def begin(self, request: BlendRequest) -> BlendSession:
        return CacheBlendSession(request, cast(CacheBlendConfig, self.config))


class HybridConfig(DeviationConfig):
    attention_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """The part of the budget for tokens that the question attends to; the rest goes to deviation."""

    @model_validator(mode="after")
    def _one_layer(self) -> HybridConfig:
        if len(self.check_layers) != 1:
            raise ValueError(f"check_layers: {list(self.check_layers)}; hybrid compares in one layer")
        return self


class HybridSession(SelectingSession):
    """Takes one part of the budget by deviation, and the other, among the rest, by what the question attends to."""

    def __init__(self, request: BlendRequest, config: HybridConfig) -> None:
        super().__init__(request)
        self._config = config
        budget = config.recompute_ratio * config.attention_share
        self._attention = attention_of(request, "hybrid") if budget and self.candidates.any() else None

    def selects_in(self, layer_id: int) -> bool:
        return layer_id in self._config.check_layers

    def choose(self, layer: Layer) -> torch.Tensor | None:
        config = self._config
        if layer.number != config.check_layers[0]:
            return self.candidates if layer.number == 0 else None
        share = config.attention_share if self._attention is not None else 0.0
        scores = deviation(layer, self.candidates, config.metric)
        chosen = self.largest(scores, config.recompute_ratio * (1 - share))
        if self._attention is not None:
            chosen |= self.largest(self._attention, config.recompute_ratio * share, among=~chosen)
        return chosen


class HybridExecutor(BlendExecutor):
    """`hybrid`: half by deviation, half by what the question attends to. It costs a pass of the question more."""

    type = "hybrid"
    Config = HybridConfig

    def __init__(self, config: HybridConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        check_layers(config, spec)

    def begin(self, request: BlendRequest) -> BlendSession:
        return HybridSession(request, cast(HybridConfig, self.config))


def _mask(places: torch.Tensor, size: int) -> torch.Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[places] = True
    return mask
