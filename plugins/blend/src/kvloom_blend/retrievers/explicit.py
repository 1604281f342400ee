"""`explicit`: the client says where passages begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from .passages import Passage, PassageRetriever


class ExplicitRetriever(PassageRetriever):
    """Passages lie between boundaries: `[0, 120, 388]` are tokens 0 to 119, 120 to 387, and the rest.

    Without boundaries a request is one passage.
    """

    type = "explicit"
    takes_boundaries = True

    def passages(self, tokens: torch.Tensor, boundaries: Sequence[int] | None) -> list[Passage]:
        bounds = list(boundaries or ())
        if any(a > b for a, b in pairwise([0, *bounds, len(tokens)])):
            raise ValueError(f"boundaries: {bounds} of {len(tokens)} tokens; they go up, from 0 to their number")
        edges = sorted({0, *bounds, len(tokens)})
        return [Passage(begin, end) for begin, end in pairwise(edges)]
