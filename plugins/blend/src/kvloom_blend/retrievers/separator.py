"""`separator`: passages stand between separators, which are token ids and no text: nothing is tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, cast

import torch
from pydantic import BeforeValidator, Field, NonNegativeInt

from .passages import Passage, PassageConfig, PassageRetriever

Separator = Annotated[
    tuple[NonNegativeInt, ...],
    Field(min_length=1),
    BeforeValidator(lambda value: (value,) if isinstance(value, int) and not isinstance(value, bool) else value),
]
"""One token id, or several in a row."""


class SeparatorRetriever(PassageRetriever):
    """The separators stay in the prompt and are always computed: they belong to no passage."""

    type = "separator"

    class Config(PassageConfig):
        separator: Separator
        """Token ids, in order, that stand between passages."""

    @property
    def separator(self) -> tuple[int, ...]:
        return cast(SeparatorRetriever.Config, self.config).separator

    def check_vocabulary(self, size: int) -> None:
        super().check_vocabulary(size)
        for token in self.separator:
            self._check_token("separator", token, size)

    def passages(self, tokens: torch.Tensor, boundaries: Sequence[int] | None) -> list[Passage]:
        width = len(self.separator)
        found = occurrences(tokens, self.separator)
        edges = [(0, 0), *((at, at + width) for at in found), (len(tokens), len(tokens))]
        return [Passage(end, begin) for (_, end), (begin, _) in pairwise(edges) if begin > end]


def occurrences(tokens: torch.Tensor, pattern: Sequence[int]) -> list[int]:
    """Where `pattern` begins, from left to right, without overlaps."""
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
