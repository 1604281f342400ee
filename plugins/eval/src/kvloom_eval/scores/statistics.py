"""Means over items with bootstrap intervals, and the tasks that say something about a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

BOOTSTRAPS = 4000


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


def mean(values: Sequence[float]) -> Mean:
    """The mean over items, and its interval by resampling them."""
    return stratified({"": values})


def stratified(groups: Mapping[str, Sequence[float]]) -> Mean:
    """The mean of the groups' means, each group's items resampled by themselves. ValueError without any."""
    if not groups or not all(groups.values()):
        raise ValueError("a mean of no items")
    chance = torch.Generator().manual_seed(0)
    centre, drawn = 0.0, torch.zeros(BOOTSTRAPS, dtype=torch.float64)
    for values in groups.values():
        each = torch.tensor(values, dtype=torch.float64)
        picks = torch.randint(len(each), (BOOTSTRAPS, len(each)), generator=chance)
        centre += float(each.mean()) / len(groups)
        drawn += each[picks].mean(1) / len(groups)
    return Mean(centre, float(drawn.quantile(0.025)), float(drawn.quantile(0.975)))


def differences(ours: Sequence[float], exact: Sequence[float]) -> list[float]:
    """Item by item. ValueError for lists of different lengths."""
    return [one - other for one, other in zip(ours, exact, strict=True)]


def dropped(exact: Sequence[float], without: Sequence[float], chance: float) -> str:
    """The reason why a task says nothing about a model, from its scores with and without the context; empty if it
    does."""
    whole, loss = mean(exact), mean(differences(without, exact))
    if not whole.low > chance:
        return f"exact {whole.mean:.0%} ({whole.low:.0%} to {whole.high:.0%}) is not above chance, {chance:.0%}"
    if not loss.high < 0:
        return (
            f"no context {mean(without).mean:.0%} is not below exact {whole.mean:.0%} by more than the interval "
            f"({loss.low:.0%} to {loss.high:.0%})"
        )
    return ""
