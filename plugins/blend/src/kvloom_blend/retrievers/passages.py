"""Retrievers that cut a prompt into passages and look each one up by its own tokens."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple, cast

import torch

from kvloom import BlendRetriever, BlendRetrieverTask, ConfigError, Segment

from ..executors.session import check_starts
from ..settings import PassageConfig
from .load_task import LoadTask

_ELSEWHERE = "elsewhere"
"""The context of a passage's KV that was computed in some prompt or other."""


class Passage(NamedTuple):
    """Tokens `start` (inclusive) to `end` (exclusive) of one request."""

    start: int
    end: int


class PassageRetriever(BlendRetriever):
    """Looks up, for each passage of a request: an exact prefix, the passage behind the same one, the passage alone."""

    Config = PassageConfig
    takes_boundaries: ClassVar[bool] = False
    """The client may say where passages begin."""
    task: ClassVar[type[LoadTask]] = LoadTask

    @property
    def settings(self) -> PassageConfig:
        return cast(PassageConfig, self.config)

    @property
    def lead(self) -> tuple[int, ...]:
        """The tokens before a passage when it is computed alone."""
        return self.settings.lead

    @abstractmethod
    def passages(self, tokens: torch.Tensor, boundaries: Sequence[int] | None) -> list[Passage]:
        """The passages of one request, in order. boundaries: where the client says that one begins, if it does."""

    def check_passage(self, tokens: torch.Tensor) -> None:
        """Raise ValueError for tokens that would never be met as one passage."""

    def check_vocabulary(self, size: int) -> None:
        """Raise ConfigError for a token id in the settings that is outside of the model's vocabulary."""
        for token in self.lead:
            self._check_token("lead", token, size)

    def _check_token(self, setting: str, token: int, size: int) -> None:
        if token >= size:
            raise ConfigError(f"blend.retriever.{setting}", f"{token} is not a token: the vocabulary has {size}")

    def new_request(
        self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor, *, salt: str | None = None,
        boundaries: Sequence[Sequence[int]] | None = None,
    ) -> BlendRetrieverTask:  # fmt: skip
        """Start fetching. boundaries: of each request, where passages begin (and end), for retrievers that take them.

        Raises ValueError if `query_start_loc` or the boundaries do not fit the tokens.
        """
        tokens, starts = input_tokens.cpu(), query_start_loc.tolist()
        check_starts(starts, len(tokens))
        if boundaries is not None and not self.takes_boundaries:
            raise ValueError(f"boundaries: retriever {self.type!r} finds passages by itself; `explicit` takes them")
        if boundaries is not None and len(boundaries) != len(starts) - 1:
            raise ValueError(f"boundaries: of {len(boundaries)} requests, the batch has {len(starts) - 1}")
        chosen: list[Segment] = []
        exact = torch.zeros(len(tokens), dtype=torch.bool)
        for number, (begin, end) in enumerate(pairwise(starts)):
            request = tokens[begin:end]
            bounds = None if boundaries is None else boundaries[number]
            prefix, found = self.stored(request, bounds, salt=salt)
            exact[begin : begin + (prefix[-1].end if prefix else 0)] = True
            chosen += [Segment(begin + one.start, begin + one.end, one.key) for one in (*prefix, *found)]
        return self.task(self.engine, chosen, len(tokens), device=input_tokens.device, exact=exact)

    def stored(
        self, tokens: torch.Tensor, boundaries: Sequence[int] | None = None, *, salt: str | None = None
    ) -> tuple[list[Segment], list[Segment]]:
        """The segments of one request that the tiers report: its prefix, and those behind it at their places in the
        request."""
        prefix = self._prefix(tokens, salt)
        reached = prefix[-1].end if prefix else 0
        return prefix, list(self._found(tokens, reached, boundaries, salt))

    def segments(
        self, tokens: torch.Tensor, passage: Passage, *, context: str = "", salt: str | None = None
    ) -> list[Segment]:
        """The segments of one passage of a request, at their places in it. context: "" for the passage alone."""
        own = self.engine.passage(
            tokens[passage.start : passage.end], lead=() if context else self.lead, context=context, salt=salt
        )
        return [Segment(passage.start + one.start, passage.start + one.end, one.key) for one in own]

    def alone(self, tokens: torch.Tensor, *, salt: str | None = None) -> list[Segment]:
        """Under which keys a passage is kept that was computed alone, behind `lead`; places count from its start."""
        return self.segments(tokens, Passage(0, len(tokens)), salt=salt)

    def in_context(
        self, tokens: torch.Tensor, boundaries: Sequence[int] | None = None, *, salt: str | None = None
    ) -> list[Segment]:
        """Under which keys the passages of a prompt are kept that was computed as a whole.

        The first context that a passage is seen in serves all others; each later one serves itself only.
        """
        if not self.settings.in_context:
            return []
        passages = self.passages(tokens, boundaries)
        segments = [self.segments(tokens, at, context=_ELSEWHERE, salt=salt) for at in passages]
        there = iter(self.engine.find([one for some in segments for one in some]).tolist())
        kept: list[Segment] = []
        for at, context, some in zip(passages, _contexts(tokens, passages), segments, strict=True):
            known = [next(there) for _ in some]
            kept += self.segments(tokens, at, context=context, salt=salt) if all(known) else some
        return kept

    def learn(self, tokens: torch.Tensor, *, salt: str | None = None) -> None:
        """Called when KV of a text was kept."""

    # -- inside --------------------------------------------------------------------------------------------------------

    def _prefix(self, tokens: torch.Tensor, salt: str | None) -> list[Segment]:
        if not self.settings.prefix:
            return []
        hit = self.engine.lookup(tokens, salt=salt).tokens
        return self.engine.segments(tokens[:hit], salt=salt)

    def _found(
        self, tokens: torch.Tensor, reached: int, boundaries: Sequence[int] | None, salt: str | None
    ) -> Iterable[Segment]:
        """Stored segments behind the first `reached` tokens: the best one for each piece."""
        passages = self.passages(tokens, boundaries)
        kinds = [[""] * len(passages)]
        if self.settings.in_context:
            kinds = [_contexts(tokens, passages), [_ELSEWHERE] * len(passages), *kinds]
        best: dict[int, Segment] = {}
        for contexts in kinds:
            named = zip(passages, contexts, strict=True)
            wanted = [one for at, word in named for one in self.segments(tokens, at, context=word, salt=salt)]
            wanted = [one for one in wanted if one.start >= reached and one.start not in best]
            there = self.engine.find(wanted).tolist() if wanted else []
            best |= {one.start: one for one, found in zip(wanted, there, strict=True) if found}
        return [best[start] for start in sorted(best)]


def _contexts(tokens: torch.Tensor, passages: Sequence[Passage]) -> list[str]:
    """A word for the context of each passage: the passage before it, or the beginning of the prompt."""
    before = [Passage(0, passages[0].start) if passages else Passage(0, 0), *passages]
    return [_behind(tokens[one.start : one.end]) for one in before[: len(passages)]]


def _behind(tokens: torch.Tensor) -> str:
    return "behind " + hashlib.sha256(tokens.to(torch.int32).contiguous().numpy().tobytes()).hexdigest()[:32]
