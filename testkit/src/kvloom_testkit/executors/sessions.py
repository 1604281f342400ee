"""Blending without a model: batches of random numbers, and sessions that are taken through all layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvloom import BlendExecutor, BlendOutput, BlendRequest, BlendSession
from kvloom_testkit.subjects import SPEC

LAYERS, HIDDEN = SPEC.num_layers, SPEC.hidden_dim


@dataclass(frozen=True)
class Batch:
    """A model's and a retriever's input to an executor, of random numbers."""

    request: BlendRequest
    retrieved: torch.Tensor
    """`[2, layers, tokens, hidden]`: K, rotated to the positions that the tokens have now, and V."""
    fresh_q: torch.Tensor
    """`[layers, tokens, hidden of Q]`: Q as the model would compute it."""
    fresh: torch.Tensor
    """`[2, layers, tokens, hidden]`: K and V as the model would compute them."""
    positions: torch.Tensor

    @property
    def starts(self) -> list[int]:
        return list(self.request.query_start_loc.tolist())

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them."""
        request = self.request
        given = (request.input_tokens, request.query_start_loc, request.valid_mask, self.positions)
        return (*given, self.retrieved, self.fresh_q, self.fresh)


def batch_of(
    lengths: tuple[int, ...], *, seed: int = 0, valid: float = 0.7, dtype: torch.dtype | None = None,
    indices: torch.dtype = torch.int64, q_heads: int = 1,
) -> Batch:  # fmt: skip
    """A batch of requests with the given lengths; the share `valid` of the tokens was retrieved.

    indices: the dtype of positions and of `query_start_loc`. q_heads: heads of Q for each head of K and V.
    """
    random = torch.Generator().manual_seed(seed)
    total, dtype = sum(lengths), SPEC.torch_dtype if dtype is None else dtype
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=indices)
    mask = torch.rand(total, generator=random) < valid
    tokens, attention = torch.randint(0, 50_000, (total,), generator=random), torch.rand(total, generator=random)
    request = BlendRequest(tokens, starts, mask, attention=lambda: attention)
    retrieved = torch.randn(2, LAYERS, total, HIDDEN, generator=random).to(dtype)
    fresh = torch.randn(2, LAYERS, total, HIDDEN, generator=random).to(dtype)
    fresh_q = torch.randn(LAYERS, total, HIDDEN * q_heads, generator=random).to(dtype)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(indices)
    return Batch(request, retrieved, fresh_q, fresh, positions)


@dataclass(frozen=True)
class Layer:
    """One call of `blend`: the tokens that reached it, and its output."""

    layer: int
    handed_on: torch.Tensor
    """Places in the batch."""
    output: BlendOutput

    @property
    def selected(self) -> torch.Tensor:
        """Places in the batch of the tokens that go on."""
        return self.handed_on[self.output.local_indices]


def blended(
    session: BlendSession, batch: Batch, *, token_dim: int = 0, planned: torch.Tensor | None = None
) -> Iterator[Layer]:
    """Layer after layer, as a model does it: what one layer has selected is computed in the next.

    planned: the session's plan, for an engine that asked for one.
    """
    going = torch.arange(len(batch.positions))
    going = going if planned is None else going[planned]
    for layer in range(LAYERS):
        k, v = batch.retrieved[:, layer]
        fresh_k, fresh_v = batch.fresh[:, layer, going]
        output = session.blend(
            layer, k, v, batch.request.valid_mask, batch.positions, batch.fresh_q[layer, going], fresh_k, fresh_v,
            batch.positions[going], batch.request.query_start_loc, token_dim,
        )  # fmt: skip
        step = Layer(layer, going, output)
        yield step
        going = step.selected


def run(executor: BlendExecutor, batch: Batch, *, token_dim: int = 0) -> list[Layer]:
    return list(blended(executor.begin(batch.request), batch, token_dim=token_dim))


def same(one: list[Layer], two: list[Layer]) -> bool:
    """Return whether two blendings have equal results."""
    fields = ("q", "k", "v", "positions", "local_indices")
    return all(
        torch.equal(getattr(a.output, name), getattr(b.output, name))
        for a, b in zip(one, two, strict=True)
        for name in fields
    )
