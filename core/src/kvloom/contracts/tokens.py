"""TokenDatabase: tokens to segments with keys."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from kvloom.contracts.component import Component
from kvloom.types import Segment

if TYPE_CHECKING:
    import torch


class TokenDatabase(Component):
    """Cuts a token sequence into segments and names the KV of each.

    The engine sets `fingerprint`, `chunk_tokens` and `save_tails` before the first call; a command may set another
    `fingerprint` later. A key must depend on the fingerprint, the salt and every token up to the segment's end, and on
    nothing else: no environment variable, no Python `hash`. Its digest covers all of them, whatever the namespace says;
    its depth is one more than that of the segment before. Equal keys mean equal segments, start included, also where
    `chunk_tokens` differs. Called from several threads.
    """

    fingerprint: str
    """Names model and representation; the first part of every key."""
    chunk_tokens: int
    """The configured tokens per chunk."""
    save_tails: bool = False
    """The tokens behind the last whole chunk are to have segments, too. A database may have none for them."""

    @abstractmethod
    def segments(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:
        """The segments of `tokens` that `mask` selects, in order.

        tokens: 1-D integer CPU tensor. mask: 1-D bool CPU tensor of the same length, like FFFFTTTT; None selects all.
        A tail too short for a segment has none, and nor has an empty sequence. Raises ValueError if the mask is of
        another length, if its Falses are not a prefix, or end inside a segment; no side effects.
        """

    def pieces(self, tokens: torch.Tensor, start: int, *, salt: str = "") -> list[Segment]:
        """Name what else may be kept of `tokens` behind their first `start`: the segments of shorter sequences.

        Called where the segment that begins at `start` is nowhere. Returns the segments that `segments` gives for
        leading parts of these tokens and not for all of them, if they begin at `start` or behind and end within that
        segment; in order of ends. None by default: then longer sequences do not find them. No side effects.

        tokens: 1-D integer CPU tensor, as for `segments`. start: the beginning of one of their segments.
        """
        return []

    def possible(self, tokens: torch.Tensor, *, salt: str = "") -> list[Segment]:
        """Name all that is kept of `tokens` and their leading parts, whatever `save_tails` was: what goes with them.

        Returns the segments that `segments` gives for these tokens, or has given for leading parts of them, in any
        order. By default those that it gives now: a database with `pieces` names these, too. No side effects.

        tokens: 1-D integer CPU tensor, as for `segments`.
        """
        return self.segments(tokens, salt=salt)

    def learn(self, tokens: torch.Tensor, *, salt: str = "") -> None:
        """Called after a store: a database that adapts its cuts to traffic takes note here.

        tokens: 1-D, of any integer dtype: the whole sequence that was stored.

        It may change where later calls of `segments` cut, and never what a key stands for. Nor does it change the cuts
        of the very sequence that was learnt, or those for another salt: where prompts are cut would tell one tenant
        what another one has asked. It does not raise.
        """
