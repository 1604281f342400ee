"""`separator`: passages stand between separators, which are token ids and no text: nothing is tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch

from ..settings import SeparatorConfig
from .passages import Passage, PassageRetriever


class SeparatorRetriever(PassageRetriever):
    """The separators stay in the prompt and are always computed: they belong to no passage."""

    type = "separator"
    Config = SeparatorConfig

    @property
    def separator(self) -> tuple[int, ...]:
        return cast(SeparatorConfig, self.config).separator

    def check_vocabulary(self, size: int) -> None:
        super().check_vocabulary(size)
        for token in self.separator:
            self._check_token("separator", token, size)

    def check_passage(self, tokens: torch.Tensor) -> None:
        if occurrences(tokens, self.separator):
            raise ValueError("tokens: hold the separator; remember what is between separators, one passage at a time")

    def passages(self, tokens: torch.Tensor, boundaries: Sequence[int] | None) -> list[Passage]:
        width = len(self.separator)
        found = occurrences(tokens, self.separator)
        edges = [(0, 0), *((at, at + width) for at in found), (len(tokens), len(tokens))]
        return [Passage(end, begin) for (_, end), (begin, _) in pairwise(edges) if begin > end]


def occurrences(tokens: torch.Tensor, pattern: Sequence[int]) -> list[int]:
    """The positions of `pattern`, from left to right, without overlaps."""
    width = len(pattern)
    if len(tokens) < width:
        return []
    wanted = torch.tensor(pattern, dtype=torch.long)
    places = (tokens.long().unfold(0, width, 1) == wanted).all(1).nonzero().flatten().tolist()
    found: list[int] = []
    for place in places:
        if not found or place >= found[-1] + width:
            found.append(place)
    return found
