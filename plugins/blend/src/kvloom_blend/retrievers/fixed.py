"""`fixed`: pieces of fixed length of whatever was computed, found at any offset of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import cast

import torch

from kvloom import salt_tag

from ..settings import FixedConfig
from .passages import Passage
from .pieces import PieceRetriever
from .rolling import RollingHash


class FixedRetriever(PieceRetriever):
    """Cuts stored text into pieces of `piece_tokens`, and looks for them at every offset of a prompt.

    A run of twice the length holds a whole piece wherever it was cut. Each process has its own list of known pieces:
    those of other processes are found once this one has seen their text (`learn`).
    """

    type = "fixed"
    Config = FixedConfig

    def __init__(self, config: FixedConfig, spec: object = None) -> None:
        super().__init__(config, spec)  # type: ignore[arg-type]
        self._width = config.piece_tokens
        self._rolling = RollingHash(self._width)
        self._learning = Lock()
        self._known: dict[tuple[str, int], None] = {}
        """Tag of the salt, which clients may write, and hash, oldest first."""

    def passages(self, tokens: torch.Tensor, boundaries: Sequence[int] | None) -> list[Passage]:
        """The whole pieces of a text, from its first token."""
        return [Passage(at, at + self._width) for at in range(0, len(tokens) - self._width + 1, self._width)]

    def learn(self, tokens: torch.Tensor, *, salt: str | None = None) -> None:
        """Remember that the pieces of a text are kept."""
        name = self._name(salt)
        most = cast(FixedConfig, self.config).most_pieces
        with self._learning:
            for one in self._rolling.windows(_plain(tokens))[:: self._width].tolist():
                self._known.pop((name, one), None)
                self._known[name, one] = None
            while len(self._known) > most:
                del self._known[next(iter(self._known))]

    def _name(self, salt: str | None) -> str:
        return salt_tag(self.engine.salt if salt is None else salt)

    def candidates(self, tokens: torch.Tensor, reached: int, salt: str | None) -> list[Passage]:
        known, name = self._known, self._name(salt)
        windows = self._rolling.windows(_plain(tokens[reached:])).tolist()
        starts = (reached + at for at, one in enumerate(windows) if (name, one) in known)
        return [Passage(at, at + self._width) for at in starts]


def _plain(tokens: torch.Tensor) -> object:
    return tokens.to(torch.int32).contiguous().numpy()
