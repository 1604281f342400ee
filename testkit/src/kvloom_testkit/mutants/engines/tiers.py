"""Faults of a secondary tier of vLLM's offloading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.vllm.tier import DirectoryTier


class FillsRowsInReverse(Mutant, DirectoryTier):
    """The last chunk of a job is loaded into the first row."""

    breaks = "E06"

    def run(self, job: Any, move: Callable[[bytes, memoryview], bool]) -> None:
        super().run(replace(job, chunk_ids=job.chunk_ids[::-1]) if move == self.load else job, move)


class TierOfAllModels(Mutant, DirectoryTier):
    """One directory for all models of a shape."""

    breaks = "E20"

    def fingerprint(self, config: Any) -> str:
        return f"{config.model.dtype}-{self.block_size_bytes}"


class TierThatLoadsAnything(Mutant, DirectoryTier):
    """What could not be read counts as loaded."""

    breaks = "E23"

    def load(self, key: bytes, row: memoryview) -> bool:
        super().load(key, row)
        return True


class TierWithoutChecksum(Mutant, DirectoryTier):
    """Takes the content of a file for what was written."""

    breaks = "E24"

    def load(self, key: bytes, row: memoryview) -> bool:
        row[:] = self.path(key).read_bytes()[32:]
        return True
