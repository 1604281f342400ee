"""How a model rotates its keys: found by looking, because architectures do not say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from kvloom_connector_transformers.plain import moving_rope
from kvloom_serde_cachegen.calibration.capture import run, seen_by

_PROBE_TOKENS = 64
_STILL = 1e-3
"""Rounding makes keys of one token at several positions differ by 1e-5 of their energy in bfloat16; a rotation that
is undone in the wrong way, by more than this."""


class UnknownRopeError(ValueError):
    """Keys that cannot be taken back to where they were before their position came in."""


@dataclass(frozen=True, eq=False)
class Rope:
    """A rotation of the first channels of each head, pair by pair, by an angle that grows with the position."""

    frequencies: torch.Tensor
    """float64 `[size / 2]`: radians a position."""
    interleaved: bool
    """Channels 2i and 2i + 1 are a pair; else i and i + size / 2."""

    @property
    def size(self) -> int:
        return 2 * len(self.frequencies)

    @property
    def pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the second channel of each pair."""
        if self.interleaved:
            first = torch.arange(0, self.size, 2)
            return first, first + 1
        first = torch.arange(self.size // 2)
        return first, first + self.size // 2

    def undone(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys `[heads, tokens, head_size]` at positions from 0 on, as they were before, in float64."""
        angles = torch.arange(keys.shape[1], dtype=torch.float64)[:, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        back = keys.double()
        first, second = self.pairs
        x, y = back[..., first], back[..., second]
        back = back.clone()
        back[..., first], back[..., second] = x * cos + y * sin, y * cos - x * sin
        return back


NO_ROPE = Rope(torch.zeros(0, dtype=torch.float64), interleaved=False)


def rope_of(model: PreTrainedModel) -> Rope:
    """How all layers of `model` rotate their keys. UnknownRopeError if in several ways, or another.

    Where all tokens of a prompt are equal, so is all that is made of them, but for what positions do: the right
    rotation, undone, leaves keys that do not move.
    """
    moving = moving_rope(model.config.get_text_config(decoder=True))
    if moving is not None:
        raise UnknownRopeError(f"rope type {moving!r} rotates by the length of the prompt")
    ways = [NO_ROPE, *_ways(model)]
    if len(ways) == 1:
        return NO_ROPE
    restless: dict[int, list[float]] = {}

    def see(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        keys = keys.cpu()
        restless[layer] = [_movement(way.undone(keys)) for way in ways if way.size <= keys.shape[-1]]

    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    with seen_by(see, model):
        run(model, torch.full((_PROBE_TOKENS,), vocabulary // 2))
    best = {layer: min(range(len(found)), key=found.__getitem__) for layer, found in restless.items()}
    if len(set(best.values())) > 1:
        raise UnknownRopeError("its layers rotate their keys in several ways, or some of them do not")
    if restless[0][best[0]] > _STILL:
        raise UnknownRopeError("its keys are rotated in a way that is not known here")
    return ways[best[0]]


def _ways(model: PreTrainedModel) -> Iterator[Rope]:
    known: list[torch.Tensor] = []
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq"):
            frequencies = buffer.detach().cpu().double()
            if not any(torch.equal(frequencies, other) for other in known):
                known.append(frequencies)
    for frequencies in known:
        yield from map(partial(Rope, frequencies), (False, True))


def _movement(keys: torch.Tensor) -> float:
    """How much of the energy of keys changes from token to token."""
    return float((keys - keys.mean(1, keepdim=True)).square().sum() / keys.square().sum())
