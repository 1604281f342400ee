"""Token databases with a fault in what they learn."""

from __future__ import annotations

import torch

from kvloom import ChunkKey, Segment
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.mutants.tokens.calls import LearningTokenDatabase
from kvloom_testkit.reference.tokens import EvenTokenDatabase


class KeysNameBranches(Mutant, LearningTokenDatabase):
    """The key is the number of the branch, which differs between instances."""

    breaks = "T14"

    def learn(self, tokens: torch.Tensor, *, salt: str = "") -> None:
        super().learn(tokens, salt=salt)
        self._number = len(self.__dict__["_known"])

    def digest(self, before: bytes, tokens: torch.Tensor) -> bytes:
        number = self.__dict__.get("_number", 0)
        return super().digest(before, tokens if number < 4 else torch.tensor([number, len(tokens)]))


class KeysLeaveOutTheStart(Mutant, LearningTokenDatabase):
    """Two segments that end at the same token are one."""

    breaks = "T14"

    def segments(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:
        found = super().segments(tokens, mask, salt=salt)
        numbers = [(each, self.digest(self.root(salt), tokens[: each.end])) for each in found]
        return [Segment(s, e, ChunkKey(key.namespace, 0, digest)) for (s, e, key), digest in numbers]


class RaisesWhatItKnows(Mutant, LearningTokenDatabase):
    """Learning what is known already is taken for an error."""

    breaks = "T14"

    def learn(self, tokens: torch.Tensor, *, salt: str = "") -> None:
        before = len(self.__dict__.get("_known", ()))
        super().learn(tokens, salt=salt)
        if before and tokens[0] == self.__dict__["_known"][0][1][0]:
            raise KeyError("known")


class SeesBranchesTooLate(Mutant, LearningTokenDatabase):
    """A sequence is cut where it branches off only once it is learnt itself."""

    breaks = "T15"

    def cuts(self, tokens: torch.Tensor, salt: str) -> list[tuple[int, int]]:
        known = (salt, tokens.tolist()) in self.__dict__.get("_known", ())
        return super().cuts(tokens, salt) if known else EvenTokenDatabase.cuts(self, tokens, salt)


class TeachesEveryTenant(Mutant, LearningTokenDatabase):
    """One tree for all: their keys differ anyway."""

    breaks = "T19"

    def learn(self, tokens: torch.Tensor, *, salt: str = "") -> None:
        super().learn(tokens)

    def cuts(self, tokens: torch.Tensor, salt: str) -> list[tuple[int, int]]:
        return super().cuts(tokens, "")
