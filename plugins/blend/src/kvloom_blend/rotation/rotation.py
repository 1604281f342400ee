"""The rotation of one layer's K: its frequencies, which dims of a head they turn, and how torch does it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import native
from .native import Turn


class Rotation:
    """Moves K to other positions. Immutable; one serves all layers that have the same rope.

    inv_freq: float32 `[pairs]`, the model's own, in radians a position. Each head's dims from `start` to
    `start + 2 * pairs` are turned, the others left as they are (partial rotary; the rope slice of an MLA row).
    head_size: the dims of a head. interleaved: neighbours make a pair (GLM, Cohere, GPT-J), else the halves of the dims
    that are turned do (Llama). sections: int `[pairs]`, for MRoPE: which row of positions turns each pair.

    K holds the model's scale of attention (yarn, longrope) already, and a rotation leaves it there.
    """

    __slots__ = ("head_size", "interleaved", "inv_freq", "sections", "start")

    inv_freq: Tensor
    head_size: int
    interleaved: bool
    start: int
    sections: Tensor | None

    def __init__(
        self, inv_freq: Tensor, *, head_size: int, interleaved: bool = False, start: int = 0,
        sections: Tensor | None = None,
    ) -> None:  # fmt: skip
        if inv_freq.ndim != 1 or not len(inv_freq) or not inv_freq.is_floating_point():
            raise ValueError(f"inv_freq: expected frequencies [pairs], got {inv_freq.dtype} {list(inv_freq.shape)}")
        if not torch.isfinite(inv_freq).all():
            raise ValueError("inv_freq: not all of it is finite")
        if not 0 <= start <= head_size - 2 * len(inv_freq):
            raise ValueError(f"start: {len(inv_freq)} pairs from dimension {start} on exceed the head size {head_size}")
        if sections is not None and (sections.shape != inv_freq.shape or int(sections.min()) < 0):
            raise ValueError(f"sections: expected one for each of {len(inv_freq)} pairs, got {sections.tolist()}")
        own = None if sections is None else sections.detach().long().clone()
        values = (inv_freq.detach().float().clone(), head_size, interleaved, start, own)
        for name, value in zip(("inv_freq", "head_size", "interleaved", "start", "sections"), values, strict=True):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a Rotation does not change")

    def __repr__(self) -> str:
        layout = "interleaved" if self.interleaved else "halves"
        return f"Rotation({self.pairs} pairs from dim {self.start} of {self.head_size}, {layout})"

    @property
    def pairs(self) -> int:
        return len(self.inv_freq)

    def same_as(self, other: Rotation) -> bool:
        """Return whether both rotate every K alike."""
        plain = ("head_size", "interleaved", "start")
        return (
            all(getattr(self, name) == getattr(other, name) for name in plain)
            and _equal(self.inv_freq, other.inv_freq)
            and _equal(self.sections, other.sections)
        )

    def turn(self, old: Tensor, new: Tensor) -> Turn:
        """From `old` positions to `new` ones: int `[tokens]`, or `[sections, tokens]` for MRoPE. On their device.

        The model rounds a position's angle to float32 before it takes the cosine. Here both angles are rounded in the
        same way, and their difference is exact; a single angle for the difference would be 5e-3 off after 30,000
        tokens.
        """
        if old.shape != new.shape or old.device != new.device:
            raise ValueError(f"new: {list(new.shape)} on {new.device}, but old: {list(old.shape)} on {old.device}")
        angle = self._angle(new)
        angle -= self._angle(old)
        return Turn(angle.cos().float(), angle.sin().float())

    def _angle(self, positions: Tensor) -> Tensor:
        """float64 `[tokens, pairs]`"""
        if positions.is_floating_point() or positions.ndim not in (1, 2):
            raise ValueError(f"positions: expected int [tokens], got {positions.dtype} {list(positions.shape)}")
        inv_freq = self.inv_freq.to(positions.device)
        if positions.ndim == 1:
            return (positions.float()[:, None] * inv_freq).double()
        if self.sections is None:
            if not bool((positions == positions[0]).all()):
                raise ValueError("positions: they differ between sections, but this rope has no sections")
            return self._angle(positions[0])
        return (positions.float()[self.sections.to(positions.device)].T * inv_freq).double()

    def apply(self, k: Tensor, turn: Turn, *, out: Tensor | None = None) -> Tensor:
        """K `[tokens, heads * head_size]` turned: a new tensor, or `out`, which may be `k` itself.

        Tokens may lie apart in both. In float32, rounded once to the dtype of `k`. ValueError for what does not fit.
        """
        return self.apply_layers([k], turn, outs=None if out is None else [out])[0]

    def apply_layers(
        self, ks: Sequence[Tensor], turn: Turn, *, outs: Sequence[Tensor] | None = None
    ) -> Sequence[Tensor]:
        """`apply` for K of several layers, of one shape, dtype and device: quicker than one after the other."""
        if outs is None:
            outs = [torch.empty(k.shape, dtype=k.dtype, device=k.device) for k in ks]
        for k, out in zip(ks, outs, strict=True):
            self._check(k, turn, out)
            if k.shape != ks[0].shape or k.dtype != ks[0].dtype:
                raise ValueError(f"ks: {k.dtype} {list(k.shape)} beside {ks[0].dtype} {list(ks[0].shape)}")
        if ks and not native.rotate(self, turn, ks, outs):
            for k, out in zip(ks, outs, strict=True):
                self.by_torch(k, turn, out=out)
        return outs

    def by_torch(self, k: Tensor, turn: Turn, *, out: Tensor | None = None) -> Tensor:
        """The reference implementation of `apply`, on any device."""
        out = torch.empty(k.shape, dtype=k.dtype, device=k.device) if out is None else out
        cos, sin = turn.cos[:, None], turn.sin[:, None]
        x, y = (half.float() for half in self.halves(k))
        # Products and sums are rounded each for itself: the native code gives the same bits.
        turned_x, turned_y = x * cos - y * sin, y * cos + x * sin
        if out.data_ptr() != k.data_ptr():
            out.copy_(k)
        for half, turned in zip(self.halves(out), (turned_x, turned_y), strict=True):
            half.copy_(turned)
        return out

    def halves(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Two views of K `[..., heads * head_size]`, each `[..., heads, pairs]`: the first and second of each pair."""
        end = self.start + 2 * self.pairs
        turned = k.unflatten(-1, (-1, self.head_size))[..., self.start : end]
        if self.interleaved:
            return turned[..., 0::2], turned[..., 1::2]
        return turned[..., : self.pairs], turned[..., self.pairs :]

    def _check(self, k: Tensor, turn: Turn, out: Tensor) -> None:
        if k.ndim != 2 or k.shape[1] % self.head_size or not k.is_floating_point():
            raise ValueError(f"k: expected [tokens, heads * {self.head_size}] of floats, got {k.dtype} {list(k.shape)}")
        for name, table in zip(Turn._fields, turn, strict=True):
            if table.shape != (len(k), self.pairs) or table.dtype != torch.float32 or table.device != k.device:
                raise ValueError(
                    f"turn.{name}: expected float32 {[len(k), self.pairs]} on {k.device}, "
                    f"got {table.dtype} {list(table.shape)} on {table.device}"
                )
        if out.shape != k.shape or out.dtype != k.dtype or out.device != k.device:
            raise ValueError(
                f"out: expected {k.dtype} {list(k.shape)} on {k.device}, "
                f"got {out.dtype} {list(out.shape)} on {out.device}"
            )
        if k.numel() and out.data_ptr() == k.data_ptr() and out.stride() != k.stride():
            raise ValueError(f"out: lies where k does, with strides {out.stride()} instead of {k.stride()}")


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.cpu(), other.cpu())
