"""Blending: reuse KV that was computed in another context. The interfaces of CacheBlend, inside sessions.

Shapes are those of one layer: Q, K and V of `[num_tokens, hidden_dim]` over the tokens of one batch, in which
`query_start_loc` (one entry more than requests) says where each request starts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.contracts.component import Component

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class BlendRetrieverResult:
    """The stored KV of one layer, as long as the input tokens."""

    k: torch.Tensor | None
    """None if nothing was retrieved; undefined where `valid_mask` is False."""
    v: torch.Tensor | None
    valid_mask: torch.Tensor
    """Bool, on CPU: whose KV was retrieved."""
    original_positions: torch.Tensor
    """The position each K was rotated to when it was stored, 0 where invalid; on the device of `k`."""


class BlendRetrieverTask(ABC):
    """One request batch whose KV is being fetched."""

    @abstractmethod
    def result(self, layer_id: int) -> BlendRetrieverResult:
        """Block until the KV of `layer_id` is there."""


class BlendRetriever(Component):
    """Finds stored KV for any part of a prompt."""

    @abstractmethod
    def new_request(self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor) -> BlendRetrieverTask:
        """Start fetching, possibly in the background. Neither argument is changed."""


@dataclass(frozen=True, slots=True)
class BlendRequest:
    """What a blend session is begun with."""

    input_tokens: torch.Tensor
    query_start_loc: torch.Tensor
    valid_mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class BlendOutput:
    """A short Q over a long, blended KV."""

    q: torch.Tensor
    """Of the selected tokens only."""
    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    """Of the selected tokens in the input sequence."""
    local_indices: torch.Tensor
    """Of the selected tokens in the fresh Q."""
    query_start_loc: torch.Tensor | None
    """Where each request starts in `q`; None if no selection was made."""


class BlendSession(ABC):
    """The blending of one batch, layer by layer; all state lives here, so that requests do not meet."""

    @abstractmethod
    def blend(
        self,
        layer_id: int,
        retrieved_k: torch.Tensor,
        retrieved_v: torch.Tensor,
        valid_mask: torch.Tensor,
        original_positions: torch.Tensor,
        fresh_q: torch.Tensor,
        fresh_k: torch.Tensor,
        fresh_v: torch.Tensor,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        token_dim: int,
    ) -> BlendOutput:
        """Merge retrieved and fresh KV of one layer; inputs are not changed.

        The fresh tensors are of the tokens that the layer before has selected, in its order; in the first, of all.
        Invalid tokens are always selected, and so is the last one of each request, from which the next token is
        predicted.
        """


class BlendExecutor(Component):
    """Decides which tokens to recompute and merges the rest."""

    @abstractmethod
    def begin(self, request: BlendRequest) -> BlendSession: ...
