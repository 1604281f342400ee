"""A blend executor that reuses nothing: what blending is compared with."""

from __future__ import annotations

import torch

from kvloom import BlendExecutor, BlendOutput, BlendRequest, BlendSession


class FullSession(BlendSession):
    """Selects everything, in every layer."""

    def blend(
        self, layer_id: int, retrieved_k: torch.Tensor, retrieved_v: torch.Tensor, valid_mask: torch.Tensor,
        original_positions: torch.Tensor, fresh_q: torch.Tensor, fresh_k: torch.Tensor, fresh_v: torch.Tensor,
        positions: torch.Tensor, query_start_loc: torch.Tensor, token_dim: int,
    ) -> BlendOutput:  # fmt: skip
        return BlendOutput(fresh_q, fresh_k, fresh_v, positions, torch.arange(len(positions)), None)


class FullExecutor(BlendExecutor):
    """Computes every token again."""

    type = "kit_full"

    def begin(self, request: BlendRequest) -> BlendSession:
        return FullSession()
