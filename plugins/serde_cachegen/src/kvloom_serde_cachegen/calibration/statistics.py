"""From KV and gradients to a profile: means, covariances, and what noise in each channel costs."""

from __future__ import annotations

import torch

from kvloom_serde_cachegen.calibration.rope import Rope
from kvloom_serde_cachegen.profile import RANK_UNIT, Transform, quantised

_FIRST_TOKENS = 4
_LEAST_COST = 0.1
"""Minimum cost of a channel, relative to the mean of its layer, whatever a short text suggests."""
_FURTHEST = 2.0
"""Maximum factor by which steps get finer or coarser than values deviate, for layers that are more or less sensitive to
noise."""
_LEAST_DEVIATION = 0.05
"""Minimum deviation relative to that of the layer: components that vary less are left out, and read as zero."""


class Statistics:
    """Sums over tokens, in float64. K is taken before RoPE.

    The first tokens of a text are left out: all others attend to them, whatever they are, so that their KV is unlike
    any other, and what depends on it would hide what depends on the rest.
    """

    def __init__(self, rope: Rope, *, klt: bool) -> None:
        self._rope = rope
        self._klt = klt
        self.tokens = 0
        self._gradients = torch.zeros(())
        """`[2, layers, heads, head_size]`: squares."""
        self._sums = torch.zeros(())
        """`[2, layers, hidden]`"""
        self._products = torch.zeros(())
        """`[2, layers, hidden, hidden]`"""

    def see(self, kv: torch.Tensor) -> None:
        """The KV of a text, `[2, layers, tokens, heads, head_size]`."""
        self.tokens += kv.shape[2] - _FIRST_TOKENS
        if self._klt:
            rows = self._before_rope(kv).flatten(3)
            self._sums = self._sums + rows.sum(2)
            self._products = self._products + rows.transpose(2, 3) @ rows

    def see_gradients(self, gradients: torch.Tensor) -> None:
        """By the KV of a text from its first token on, of the same shape."""
        self._gradients = self._gradients + self._before_rope(gradients).square().sum(2)

    def _before_rope(self, kv: torch.Tensor) -> torch.Tensor:
        keys, values = kv
        return torch.stack([self._rope.undone(keys), values.double()])[:, :, _FIRST_TOKENS:]

    def costs(self) -> torch.Tensor:
        """The cost of noise in each channel, `[2, layers, hidden]`: the rms of gradients, equal within RoPE's pairs."""
        squares = self._gradients.clone()
        first, second = self._rope.pairs
        both = (squares[0][..., first] + squares[0][..., second]) / 2
        squares[0][..., first], squares[0][..., second] = both, both
        rms = squares.flatten(2).sqrt()
        return rms.maximum(_LEAST_COST * rms.mean(2, keepdim=True))

    def weights(self) -> torch.Tensor:
        """`Profile.weights`."""
        relative = 1 / self.costs()
        return (relative / relative.log().mean(2, keepdim=True).exp()).float()

    def transform(self) -> Transform:
        """`Profile.transform`. ValueError if too little was seen to make one."""
        hidden = self._sums.shape[-1]
        if self.tokens < 2 * hidden:
            raise ValueError(
                f"{self.tokens} tokens are too few for klt, which needs {2 * hidden} for {hidden} channels"
            )
        costs = self.costs()
        scales = (costs / costs.mean(2, keepdim=True)).float()
        means = self._sums / self.tokens
        covariances = self._products / self.tokens - means[..., :, None] * means[..., None, :]
        sigmas = relative_to(covariances.diagonal(dim1=2, dim2=3).clamp(min=0).sqrt().mean(2), costs.mean(2))
        covariances *= scales[..., :, None].double() * scales[..., None, :].double()
        pairs = [
            [quantised(components(*each)) for each in zip(rows, map(float, least), strict=True)]
            for rows, least in zip(covariances, sigmas, strict=True)
        ]
        bases, exponents = (tuple(tuple(pair[which] for pair in row) for row in pairs) for which in (0, 1))
        return Transform(means.float(), scales, sigmas.float(), bases, exponents)


def relative_to(deviations: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
    """The scale of the steps of each plane and layer, `[2, layers]`.

    For a given number of bits, noise does the least harm if it harms all layers equally. The scale is bounded by the
    deviation of the values: if it is much finer, the rounding of components shows; if it is much coarser, gradients say
    little about so large a change.
    """
    finer = deviations.log() + costs.log()
    return deviations * (finer.mean() - finer).exp().clamp(1 / _FURTHEST, _FURTHEST)


def components(covariance: torch.Tensor, least: float) -> torch.Tensor:
    """Eigenvectors `[rank, hidden]` of the greatest variance: all that deviate by more than a part of `least`."""
    variances, vectors = torch.linalg.eigh(covariance)
    wanted = int((variances > (_LEAST_DEVIATION * least) ** 2).sum())
    rank = min(max(-(-wanted // RANK_UNIT), 1) * RANK_UNIT, len(covariance))
    kept = vectors.flip(1)[:, :rank].T
    # A vector and its opposite say the same: that with a positive greatest element is taken.
    greatest = kept.gather(1, kept.abs().argmax(1, keepdim=True))
    return kept * greatest.sign()
