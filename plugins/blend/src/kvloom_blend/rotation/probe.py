"""K of a model at several positions, as its own code computes it.

A sequence of one token attends to itself alone, whatever its position. So K of one token at two positions differs in
every layer by what the position does to K, and by nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .rotation import Rotation

_LONGEST = 1 << 17
_TOKENS = 2
_FLOOR = 0.01


class Layer(NamedTuple):
    """KV of a layer: `[positions, tokens, heads, dims]` each."""

    keys: Tensor
    values: Tensor

    def rows(self) -> Tensor:
        """The rows that may rotate, `[positions, rows, dims]`: K; for MLA, the latent and the rope slice that is kept
        in the place of V. ValueError if V moves otherwise."""
        keys, values = self.keys.flatten(1, -2), self.values.flatten(1, -2)
        if stays(values):
            return keys
        if not stays(keys) or keys.shape[:-1] != values.shape[:-1]:
            raise ValueError("V is not the same at every position")
        return torch.cat((keys, values), dim=-1)


def stays(rows: Tensor) -> bool:
    """Return whether `[positions, rows, dims]` are the same at every position."""
    return bool((errors(rows[:1].expand_as(rows), rows, None) <= tolerance(rows.dtype)).all())


class Probe(NamedTuple):
    positions: Tensor
    """int64 `[sections, positions]`; one section unless the model has MRoPE."""
    layers: list[Layer]

    def turned(self, rows: Tensor, rotation: Rotation) -> Tensor:
        """The rows of the first position, turned to the others: `[positions - 1, rows, head_size]`."""
        positions = self.positions.to(rows.device)
        old, new = positions[:, :1].expand_as(positions[:, 1:]), positions[:, 1:]
        if rotation.sections is None:
            old, new = old[0], new[0]
        first = rows[:1].flatten(1).expand(len(rows) - 1, -1)
        return rotation.apply(first, rotation.turn(old, new)).view_as(rows[1:])


def probe(model: nn.Module, decoder: Any, *, longest: int | None = None) -> Probe:
    """longest: no position is beyond it; by default what the configuration says. ValueError if it cannot be done."""
    config = decoder.config
    limit = min(longest or getattr(config, "max_position_embeddings", None) or 4096, _LONGEST)
    sections = len(_rope(config).get("mrope_section") or [0])
    deltas = torch.tensor([1, limit * 5 // 13, limit - 1])
    # Each section is far from each other one at some position.
    positions = torch.stack([torch.cat((torch.tensor([0]), deltas.roll(section))) for section in range(sections)])
    with _evaluating(model), torch.no_grad():
        found = [_layers(model, config, position) for position in positions.T]
    layers = [Layer(*map(torch.stack, zip(*of_each, strict=True))) for of_each in zip(*found, strict=True)]
    return Probe(positions, layers)


def _layers(model: Any, config: Any, position: Tensor) -> list[tuple[Tensor, Tensor]]:
    """K and V of each layer `[tokens, heads, dims]`, of tokens that stand alone at `position`, int `[sections]`."""
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":
        raise ValueError("model: has no weights yet, so that its rope cannot be tried")
    tokens = torch.arange(1, _TOKENS + 1, device=device)[:, None] * config.vocab_size // (_TOKENS + 2)
    places = position.to(device)[:, None, None].expand(-1, _TOKENS, 1)
    try:
        output = model(input_ids=tokens, position_ids=places if len(places) > 1 else places[0], use_cache=True)
        kept = output.past_key_values.layers
    except (AttributeError, TypeError, IndexError, RuntimeError) as error:
        raise ValueError(f"model: {type(model).__name__} could not be tried with one token ({error})") from error
    found = []
    for number, layer in enumerate(kept):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.ndim != 4 or keys.shape[-2] != 1:
            raise ValueError(f"layer {number}: {type(layer).__name__} does not keep K and V of each token")
        found.append((keys[..., 0, :], values[..., 0, :]))
    return found


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def tolerance(dtype: torch.dtype) -> float:
    """Maximum distance between two K, relative to the length of a pair: the model's rounding at two positions."""
    return max(4 * torch.finfo(dtype).eps, 1e-5)


def errors(found: Tensor, expected: Tensor, rotation: Rotation | None) -> Tensor:
    """`[head_size]`: how far `found` is from `expected`, `[positions, rows, head_size]` each, as a part of the length
    of the pair, or of the value where it is not turned. Infinite where there is nothing that could be compared."""
    lengths = expected.float().abs()
    if rotation is not None:
        halves = rotation.halves(lengths)
        length = torch.hypot(*halves)
        if not bool((length > 0).flatten(0, -2).any(0).all()):
            return torch.full((found.shape[-1],), torch.inf)
        for half in halves:
            half.copy_(length)
    # In a pair that is tiny within its row, rounding from other sums must not count.
    lengths = lengths.maximum(_FLOOR * lengths.square().mean(-1, keepdim=True).sqrt())
    apart = (found.float() - expected.float()).abs()
    relative = torch.where(apart == 0, apart, apart / lengths)
    return relative.nan_to_num(nan=torch.inf).amax((0, 1))
