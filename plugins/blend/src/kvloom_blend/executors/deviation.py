"""Executors that select by deviation: the distance between a token's fresh KV and its retrieved KV."""

from __future__ import annotations

from typing import cast

import torch

from kvloom import BlendRequest, BlendSession, ConfigError, KVSpec

from ..settings import CacheBlendConfig, DeviationConfig, HybridConfig, Metric
from .budgeted import BudgetedExecutor
from .session import Layer, SelectingSession
from .static import attention_of


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


class CacheBlendExecutor(BudgetedExecutor):
    """`cacheblend`: computes the first layers for every token, and continues with those whose KV differs most."""

    type = "cacheblend"
    Config = CacheBlendConfig

    def __init__(self, config: CacheBlendConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        check_layers(config, spec)

    def begin(self, request: BlendRequest) -> BlendSession:
        return CacheBlendSession(request, cast(CacheBlendConfig, self.config))


class HybridSession(SelectingSession):
    """Ranks tokens by the weighted geometric mean of their deviation and of the question's attention to them."""

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
        scores = deviation(layer, self.candidates, config.metric)
        if self._attention is not None:
            weight = config.attention_share
            scores = _log(scores) * (1 - weight) + _log(self._attention) * weight
        return self.largest(scores, config.recompute_ratio)


class HybridExecutor(BudgetedExecutor):
    """`hybrid`: computes the tokens again with the largest product of deviation and the question's attention. It costs
    a pass of the question more than `cacheblend`."""

    type = "hybrid"
    Config = HybridConfig

    def __init__(self, config: HybridConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        check_layers(config, spec)

    def begin(self, request: BlendRequest) -> BlendSession:
        return HybridSession(request, cast(HybridConfig, self.config))


def _log(scores: torch.Tensor) -> torch.Tensor:
    """The logarithm, finite for 0 too."""
    return scores.clamp_min(torch.finfo(scores.dtype).tiny).log()


def _mask(places: torch.Tensor, size: int) -> torch.Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[places] = True
    return mask
