"""A blend executor that computes again only what must be, by the shortest way that is right."""

from __future__ import annotations

import torch

from kvloom import BlendExecutor, BlendOutput, BlendRequest, BlendSession


class NoneSession(BlendSession):
    """Selects, in the first layer, the tokens that were not retrieved and the last one of each request."""

    def __init__(self, request: BlendRequest) -> None:
        ends = request.query_start_loc[1:].long() - 1
        self._chosen = (~request.valid_mask).index_fill(0, ends.cpu(), True).nonzero().flatten()
        """Places in the batch."""
        self._size = len(request.valid_mask)
        self._going = torch.arange(self._size)

    def plan(self) -> torch.Tensor | None:
        self._going = self._chosen
        return torch.zeros(self._size, dtype=torch.bool).index_fill(0, self._chosen, True)

    def blend(
        self, layer_id: int, retrieved_k: torch.Tensor, retrieved_v: torch.Tensor, valid_mask: torch.Tensor,
        original_positions: torch.Tensor, fresh_q: torch.Tensor, fresh_k: torch.Tensor, fresh_v: torch.Tensor,
        positions: torch.Tensor, query_start_loc: torch.Tensor, token_dim: int,
    ) -> BlendOutput:  # fmt: skip
        local = torch.searchsorted(self._going, self._chosen)
        left_out = len(local) < len(self._going)
        starts = torch.searchsorted(self._chosen, query_start_loc.long()).to(query_start_loc.dtype)
        self._going = self._chosen
        return BlendOutput(
            fresh_q.index_select(token_dim, local),
            retrieved_k.index_copy(token_dim, self._chosen, fresh_k.index_select(token_dim, local)),
            retrieved_v.index_copy(token_dim, self._chosen, fresh_v.index_select(token_dim, local)),
            positions[local],
            local,
            starts if left_out else None,
        )


class NoneExecutor(BlendExecutor):
    """Reuses all KV that was retrieved, as it is: right only where no token has moved."""

    type = "kit_none"

    def begin(self, request: BlendRequest) -> BlendSession:
        return NoneSession(request)
