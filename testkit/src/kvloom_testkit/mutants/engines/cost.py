"""Faults in what a connector costs."""

from __future__ import annotations

import time
from typing import Any

from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.vllm.connector import DirectoryConnector


class WaitsForTheStore(Mutant, DirectoryConnector):
    """A step that saves ends when a slow store says that it has everything."""

    breaks = "E33"

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self._orders.saves:
            time.sleep(1.2)


class WaitsForALookup(Mutant, DirectoryConnector):
    """A prompt of whole blocks is asked for where the scheduler waits for the answer, of a server that is silent."""

    breaks = "E33"

    def found(self, request: Any, begin: int, end: int) -> int:
        if request.num_prompt_tokens % self.block_tokens == 0:
            time.sleep(1.2)
        return super().found(request, begin, end)


class AsksForEachBlock(Mutant, DirectoryConnector):
    """Each block is a round trip to a store far away."""

    breaks = "E34"

    def has(self, name: str) -> bool:
        time.sleep(0.03)
        return super().has(name)
