"""From queries, keys and values to a profile: means, covariances, and what noise in each channel of K costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvloom_serde_cachegen.calibration.rope import Rope
from kvloom_serde_cachegen.profile import RANK_UNIT, Transform, quantised

_LEAST_QUERY = 0.01
"""Of the mean of a layer: no channel of K is taken to matter less than this."""
_LEAST_DEVIATION = 0.05
"""Of the mean deviation: components that vary less are left out, and read as zero."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What all layers have in common."""

    kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def hidden(self) -> int:
        return self.kv_heads * self.head_size


@dataclass(slots=True)
class _Layer:
    """Sums over the tokens seen, in float64."""

    queries: torch.Tensor
    """`[hidden]`: squares, mean over the query heads of each KV head."""
    sums: torch.Tensor
    """`[2, hidden]`: K before RoPE, V."""
    products: torch.Tensor
    """`[2, hidden, hidden]`; without klt, `[0]`."""
    tokens: int = 0


class Statistics:
    """Sees every layer of every prompt."""

    def __init__(self, rope: Rope, *, klt: bool) -> None:
        self._rope = rope
        self._klt = klt
        self._layers: dict[int, _Layer] = {}
        self._shape: Shape | None = None

    def see(self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As `capture.See`. ValueError if the shapes of layers differ."""
        shape = Shape(keys.shape[0], keys.shape[2], keys.dtype)
        self._shape = self._shape or shape
        if shape != self._shape:
            raise ValueError(
                f"the KV of layer {layer} is {shape}, that of others {self._shape}: there is no such profile"
            )
        kv_heads, tokens, size = keys.shape
        squares = query.cpu().double().square().sum(1).view(kv_heads, -1, size).mean(1).flatten()
        it = self._layers.get(layer)
        if it is None:
            hidden = kv_heads * size
            products = torch.zeros(2, hidden, hidden, dtype=torch.float64) if self._klt else torch.zeros(0)
            sums = torch.zeros(2, hidden, dtype=torch.float64)
            it = self._layers[layer] = _Layer(torch.zeros(hidden, dtype=torch.float64), sums, products)
        it.queries += squares
        it.tokens += tokens
        if self._klt:
            planes = [self._rope.undone(keys.cpu()), values.cpu().double()]
            for plane, rows in enumerate(each.transpose(0, 1).flatten(1) for each in planes):
                it.sums[plane] += rows.sum(0)
                it.products[plane].addmm_(rows.T, rows)

    @property
    def tokens(self) -> int:
        return self._ordered()[0].tokens

    @property
    def num_layers(self) -> int:
        return len(self._ordered())

    @property
    def shape(self) -> Shape:
        assert self._shape is not None, "nothing was seen"
        return self._shape

    def _ordered(self) -> list[_Layer]:
        """ValueError unless every layer was seen, and all the same prompts."""
        layers = [self._layers[layer] for layer in sorted(self._layers)]
        if sorted(self._layers) != list(range(len(layers))) or len({layer.tokens for layer in layers}) != 1:
            raise ValueError(f"attention was seen in the layers {sorted(self._layers)} only, or not always")
        return layers

    def weights(self) -> torch.Tensor:
        """`Profile.weights`."""
        relative = torch.stack([1 / each for each in self._noise()])
        return (relative / relative.mean(1, keepdim=True)).float()

    def _noise(self) -> Iterator[torch.Tensor]:
        """For each layer how much noise in each channel of K costs, `[hidden]`: rms of q, equal within RoPE's pairs."""
        first, second = self._rope.pairs
        for layer in self._ordered():
            squares = (layer.queries / layer.tokens).view(self.shape.kv_heads, self.shape.head_size)
            both = (squares[:, first] + squares[:, second]) / 2
            squares[:, first], squares[:, second] = both, both
            rms = squares.flatten().sqrt()
            yield rms.clamp(min=_LEAST_QUERY * float(rms.mean()))

    def transform(self) -> Transform:
        """`Profile.transform`. ValueError if too little was seen to make one."""
        hidden = self.shape.hidden
        if self.tokens < 2 * hidden:
            raise ValueError(
                f"{self.tokens} tokens are too few for klt, which needs {2 * hidden} for {hidden} channels"
            )
        means, scales, sigmas = [], [], []
        bases: list[list[torch.Tensor]] = [[], []]
        exponents: list[list[torch.Tensor]] = [[], []]
        for layer, noise in zip(self._ordered(), self._noise(), strict=True):
            mean = layer.sums / layer.tokens
            scale = torch.stack([noise / noise.mean(), torch.ones_like(noise)]).float()
            covariance = layer.products / layer.tokens - mean[:, :, None] * mean[:, None, :]
            sigma = covariance.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().mean(1)
            for plane in (0, 1):
                weight = scale[plane].double()
                vectors = components(covariance[plane] * weight[:, None] * weight, least=float(sigma[plane]))
                base, exponent = quantised(vectors)
                bases[plane].append(base)
                exponents[plane].append(exponent)
            means.append(mean.float())
            scales.append(scale)
            sigmas.append(sigma.float())
        return Transform(
            torch.stack(means, 1), torch.stack(scales, 1), torch.stack(sigmas, 1),
            tuple(map(tuple, bases)), tuple(map(tuple, exponents)),
        )  # fmt: skip


def components(covariance: torch.Tensor, *, least: float) -> torch.Tensor:
    """Eigenvectors `[rank, hidden]` of the greatest variance: all that deviate by more than a part of `least`."""
    variances, vectors = torch.linalg.eigh(covariance)
    wanted = int((variances > (_LEAST_DEVIATION * least) ** 2).sum())
    rank = min(max(-(-wanted // RANK_UNIT), 1) * RANK_UNIT, len(covariance))
    kept = vectors.flip(1)[:, :rank].T
    # A vector and its opposite say the same: that with a positive greatest element is taken.
    greatest = kept.gather(1, kept.abs().argmax(1, keepdim=True))
    return kept * greatest.sign()
