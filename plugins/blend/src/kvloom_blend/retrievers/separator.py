"""`separator`: passages stand between separators, which are token ids and no text: nothing is tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, cast

import torch
from pydantic import BeforeValidator, Field

from .passages import Passage, PassageConfig, PassageRetriever


def _as_tokens(value: object) -> object:
    tokens = (value,) if type(value) is int else value
    if isinstance(tokens, (list, tuple)) and not (tokens and all(type(one) is int and one >= 0 for one in tokens)):
        raise ValueError("name the token id that stands between passages, or several in a row, such as [198]")
    return tokens


Separator = Annotated[tuple[int, ...], BeforeValidator(_as_tokens)]
"""One token id, or several in a row."""


class SeparatorRetriever(PassageRetriever):
    """The separators stay in the prompt and are always computed: they belong to no passage."""

    type = "separator"

    class Config(PassageConfig):
        separator: Separator = Field(default_factory=tuple, validate_default=True)
        """Token ids, in order, that stand between passages."""

    @property
    def separator(self) -> tuple[int, ...]:
        return cast(SeparatorRetriever.Config, self.config).separator

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
