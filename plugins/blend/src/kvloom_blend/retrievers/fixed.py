"""`fixed`: pieces of fixed length of whatever was computed, found at any offset of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import cast

import torch
from pydantic import Field

from kvloom import Segment

from .passages import Passage, PassageConfig, PassageRetriever
from .rolling import RollingHash

_DOMAIN = "fixed pieces"


class FixedRetriever(PassageRetriever):
    """Cuts what is kept into pieces of `piece_tokens`, and looks for them at every offset of a prompt.

    A piece has the KV of the context that it was first computed in, and keeps its neighbours' when they are found
    beside each other. A run of twice the length holds a whole piece wherever it was cut. Which pieces are known is
    each process's own knowledge: what other processes stored is found once this one has seen it (`learn`).
    """

    type = "fixed"

    class Config(PassageConfig):
        piece_tokens: int = Field(default=64, ge=16, le=4096)
        """Tokens of a piece."""
        most_pieces: int = Field(default=1 << 20, ge=1)
        """How many pieces are remembered; the oldest are forgotten first."""

    def __init__(self, config: FixedRetriever.Config, spec: object = None) -> None:
        super().__init__(config, spec)  # type: ignore[arg-type]
        self._width = config.piece_tokens
        self._rolling = RollingHash(self._width)
        self._learning = Lock()
        self._known: dict[tuple[str, int], None] = {}
        """Salt and hash, oldest first."""

    def passages(self, tokens: torch.Tensor, boundaries: Sequence[int] | None) -> list[Passage]:
        """The whole pieces of a text, from its first token."""
        return [Passage(at, at + self._width) for at in range(0, len(tokens) - self._width + 1, self._width)]

    def segments(
        self, tokens: torch.Tensor, passage: Passage, *, context: str = "", salt: str | None = None
    ) -> list[Segment]:
        # Known by its tokens alone, whatever it was computed behind: `lead` and context are not part of the key.
        own = self.engine.passage(tokens[passage.start : passage.end], context=_DOMAIN, salt=salt)
        return [Segment(passage.start + one.start, passage.start + one.end, one.key) for one in own]

    def alone(self, tokens: torch.Tensor, *, salt: str | None = None) -> list[Segment]:
        return [one for at in self.passages(tokens, None) for one in self.segments(tokens, at, salt=salt)]

    def in_context(
        self, tokens: torch.Tensor, boundaries: Sequence[int] | None = None, *, salt: str | None = None
    ) -> list[Segment]:
        return self.alone(tokens, salt=salt)

    def learn(self, tokens: torch.Tensor, *, salt: str | None = None) -> None:
        """Remember that the pieces of a text are kept."""
        name = self._name(salt)
        most = cast(FixedRetriever.Config, self.config).most_pieces
        with self._learning:
            for one in self._rolling.windows(_plain(tokens))[:: self._width].tolist():
                self._known.pop((name, one), None)
                self._known[name, one] = None
            while len(self._known) > most:
                del self._known[next(iter(self._known))]

    def _found(
        self, tokens: torch.Tensor, reached: int, boundaries: Sequence[int] | None, salt: str | None
    ) -> list[Segment]:
        wanted = [
            self.segments(tokens, Passage(at, at + self._width), salt=salt)
            for at in self._candidates(tokens, reached, self._name(salt))
        ]
        there = iter(self.engine.find([one for piece in wanted for one in piece]).tolist() if wanted else [])
        found: list[Segment] = []
        for piece in wanted:
            came = [next(there) for _ in piece]
            if piece[0].start >= reached and all(came):
                found += piece
                reached = piece[-1].end
        return found

    def _name(self, salt: str | None) -> str:
        return self.engine.config.salt if salt is None else salt

    def _candidates(self, tokens: torch.Tensor, reached: int, salt: str) -> list[int]:
        """Where a piece may stand. Those that overlap are all named: what looks known may be gone."""
        known = self._known
        windows = self._rolling.windows(_plain(tokens[reached:])).tolist()
        return [reached + at for at, one in enumerate(windows) if (salt, one) in known]


def _plain(tokens: torch.Tensor) -> object:
    return tokens.to(torch.int32).contiguous().numpy()
