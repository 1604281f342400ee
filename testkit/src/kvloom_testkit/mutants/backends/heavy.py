"""A module that imports torch, as one does for the sake of an annotation."""

from __future__ import annotations

import torch

from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.backend import DirectoryBackend


class ComesWithTorch(Mutant, DirectoryBackend):
    """Nothing of it needs it."""

    breaks = "B26"

    def device(self) -> torch.device:
        return torch.device("cpu")
