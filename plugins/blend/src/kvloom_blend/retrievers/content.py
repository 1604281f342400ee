"""`content`: pieces that end where their tokens say, so that they are the same wherever a text stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from ..settings import ContentConfig
from .passages import Passage
from .pieces import PieceRetriever
from .rolling import RollingHash

_WINDOW = 16
# No secret: every process must cut a text alike. Who prepares tokens that are cut badly has pieces of the least or most
# length.
_BASES = (1_000_003, 998_244_353)


class ContentRetriever(PieceRetriever):
    """Cuts a prompt where the last 16 tokens hash to a multiple, and looks each piece up.

    An insertion or removal only moves the cuts beside it, so the other pieces of an edited text stay the same. Cutting
    a prompt needs no knowledge, so pieces stored by any process are found by all.
    """

    type = "content"
    Config = ContentConfig

    def __init__(self, config: ContentConfig, spec: object = None) -> None:
        super().__init__(config, spec)  # type: ignore[arg-type]
        mean = cast(ContentConfig, self.config).piece_tokens
        self._least, self._most = mean // 4, mean * 4
        self._one_in = mean - self._least  # a cut comes so much later, on average, than it may
        self._rolling = RollingHash(_WINDOW, _BASES)

    def passages(self, tokens: torch.Tensor, boundaries: Sequence[int] | None) -> list[Passage]:
        """The pieces of a text; none behind the last cut, as what comes next says where that one ends."""
        hashes = self._rolling.windows(tokens.to(torch.int32).contiguous().numpy())
        cuts = np.flatnonzero(hashes % self._one_in == 0) + _WINDOW
        found, start = [], 0
        for cut in [*cuts.tolist(), len(tokens)]:
            while cut - start > self._most:
                found.append(Passage(start, start + self._most))
                start += self._most
            if cut - start >= self._least and cut < len(tokens):
                found.append(Passage(start, cut))
                start = cut
        return found

    def candidates(self, tokens: torch.Tensor, reached: int, salt: str | None) -> list[Passage]:
        return [at for at in self.passages(tokens, None) if at.start >= reached]
