"""Faults in what a connector costs."""

from __future__ import annotations

import time

from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.vllm.connector import DirectoryConnector


class WaitsForTheStore(Mutant, DirectoryConnector):
    """A step that saves ends when a slow store says that it has everything."""

    breaks = "E33"

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self._orders.saves:
            time.sleep(1.2)


class AsksForEachBlock(Mutant, DirectoryConnector):
    """Each block is a round trip to a store far away."""

    breaks = "E34"

    def has(self, name: str) -> bool:
        time.sleep(0.03)
        return super().has(name)
