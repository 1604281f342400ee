"""Finds a model's rotation of keys by experiment, because architectures do not declare it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from kvloom_serde_cachegen.measuring import context_kv

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
        """Keys `[..., tokens, heads, head_size]` at positions from 0 on, as they were before, in float64."""
        angles = torch.arange(keys.shape[-3], dtype=torch.float64)[:, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        back = keys.to(torch.float64, copy=True)
        first, second = self.pairs
        x, y = back[..., first], back[..., second]
        back[..., first], back[..., second] = x * cos + y * sin, y * cos - x * sin
        return back


NO_ROPE = Rope(torch.zeros(0, dtype=torch.float64), interleaved=False)


@torch.no_grad()
def rope_of(model: PreTrainedModel) -> Rope:
    """The rotation of keys in all layers of `model`. UnknownRopeError if layers differ, or if it is another one.

    If all tokens of a prompt are equal, their keys differ only by position: undoing the right rotation leaves equal
    keys.
    """
    ways = [NO_ROPE, *_ways(model)]
    if len(ways) == 1:
        return NO_ROPE
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.full((_PROBE_TOKENS,), vocabulary // 2, device=model.device)
    keys = context_kv(model, tokens, torch.float32)[0]
    movements = torch.stack([_movement(way.undone(keys)) for way in ways if way.size <= keys.shape[-1]])
    best = movements.argmin(0)
    if len(best.unique()) > 1:
        raise UnknownRopeError("its layers use different rotary embeddings, or some use none")
    if movements[best[0], 0] > _STILL:
        raise UnknownRopeError("its keys are rotated in an unknown way")
    return ways[int(best[0])]


def _ways(model: PreTrainedModel) -> Iterator[Rope]:
    known: list[torch.Tensor] = []
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq"):
            frequencies = buffer.detach().cpu().double()
            if not any(torch.equal(frequencies, other) for other in known):
                known.append(frequencies)
    for frequencies in known:
        yield from map(partial(Rope, frequencies), (False, True))


def _movement(keys: torch.Tensor) -> torch.Tensor:
    """For each layer, the share of its keys' energy that changes from token to token."""
    apart = keys - keys.mean(1, keepdim=True)
    return apart.square().sum((1, 2, 3)) / keys.square().sum((1, 2, 3))
