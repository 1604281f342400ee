"""Selection by executors, from given KV and attention."""

from __future__ import annotations

import pytest
import torch

from kvloom import BlendRequest
from kvloom_blend.executors import HybridExecutor
from kvloom_blend.executors.session import Layer, SelectingSession
from kvloom_blend.settings import HybridConfig

ATTENTION = torch.tensor([9.0, 1.0, 4.0, 0.0, 50.0])
DEVIATION = torch.tensor([1.0, 9.0, 4.0, 20.0, 0.0])
"""Squares of the distances of V; the last token is the question."""
NOTHING = torch.zeros(5)


@pytest.mark.parametrize(
    ("attention", "share", "chosen"),
    [(ATTENTION, 0.0, 3), (ATTENTION, 0.2, 1), (ATTENTION, 0.5, 2), (ATTENTION, 1.0, 0), (NOTHING, 0.5, 3)],
)
def test_hybrid_ranks_by_the_geometric_mean(attention: torch.Tensor, share: float, chosen: int) -> None:
    valid = torch.tensor([True, True, True, True, False])
    request = BlendRequest(torch.arange(5), torch.tensor([0, 5]), valid, attention=lambda: attention)
    config = HybridConfig(recompute_ratio=0.25, attention_share=share, check_layers=(0,))
    session = HybridExecutor(config).begin(request)
    assert isinstance(session, SelectingSession)
    fresh, retrieved = DEVIATION.sqrt()[:, None], torch.zeros(5, 1)
    layer = Layer(0, torch.arange(5), retrieved, retrieved, fresh, fresh, torch.arange(5), 0)
    selected = session.choose(layer)
    assert selected is not None and selected.nonzero().flatten().tolist() == [chosen]
