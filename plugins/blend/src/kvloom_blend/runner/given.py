"""KV that is passed in directly: to test a model, and to measure."""

from __future__ import annotations

import torch

from kvloom import BlendRetrieverResult, BlendRetrieverTask


class GivenTask(BlendRetrieverTask):
    """KV from nowhere: what a runner is to blend, `[2, layers, tokens, hidden]`."""

    def __init__(self, kv: torch.Tensor, valid: torch.Tensor, stood: torch.Tensor) -> None:
        """valid: bool, on CPU. stood: where the tokens stood when K was rotated."""
        self.kv, self.valid, self.stood = kv, valid, stood.to(kv.device)

    def result(self, layer_id: int) -> BlendRetrieverResult:
        return BlendRetrieverResult(self.kv[0, layer_id], self.kv[1, layer_id], self.valid, self.stood)


def kv_of(cache: object) -> torch.Tensor:
    """The content of a DynamicCache of one sequence: `[2, layers, tokens, hidden]`."""
    planes = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]  # type: ignore[attr-defined]
    return torch.stack(planes, 1).transpose(2, 3).flatten(3).contiguous()
