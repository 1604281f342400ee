"""Faults in what must not meet, and where the store fails."""

from __future__ import annotations

from typing import Any

import torch

from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.sglang import DirectoryStorage


class KeysWithoutModel(Mutant, DirectoryStorage):
    """One directory for all models."""

    breaks = "H10"

    def model(self) -> str:
        return ""


class KeysWithoutType(Mutant, DirectoryStorage):
    """One directory for all types of a model."""

    breaks = "H11"

    def fingerprint(self, pool: Any) -> str:
        return f"{hash_of(self.model())}-{pool.page_size}-{pool.layout}-{self.rank()}"


class ReadsWhatThereIs(Mutant, DirectoryStorage):
    """As many bytes as there are in a file are taken for a page."""

    breaks = "H12"

    def fingerprint(self, pool: Any) -> str:
        return f"{hash_of(self.model())}-{pool.dtype}-{pool.layout}-{self.rank()}"

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        data = self.read(key)
        if data is None:
            return None
        page: torch.Tensor = target_location
        page.view(torch.uint8)[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        return page


class KeysWithoutLayout(Mutant, DirectoryStorage):
    """One directory for all layouts of the pool."""

    breaks = "H13"

    def fingerprint(self, pool: Any) -> str:
        return f"{hash_of(self.model())}-{pool.dtype}-{pool.page_size}-{self.rank()}"


class KeysWithoutRank(Mutant, DirectoryStorage):
    """One directory for all ranks."""

    breaks = "H14"

    def rank(self) -> tuple[int, ...]:
        return ()


class LatentsOfEachRank(Mutant, DirectoryStorage):
    """Each rank has a directory, though the first one stores for all."""

    breaks = "H15"

    def rank(self) -> tuple[int, ...]:
        return (self.config.tp_rank, self.config.tp_size)


class HasNoChecksum(Mutant, DirectoryStorage):
    """Takes the content of a file for what was written."""

    breaks = "H16"

    def read(self, key: str) -> bytearray | None:
        return bytearray(self.path(key).read_bytes()[32:]) if self.exists(key) else None


class FillsWhatThereIs(Mutant, DirectoryStorage):
    """A file that ends early leaves the rest of the page as it was."""

    breaks = "H17"

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        if not self.exists(key):
            return None
        data = bytearray(self.path(key).read_bytes()[32:])
        page: torch.Tensor = target_location
        page.view(torch.uint8)[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        return page


class RaisesAtLosses(Mutant, DirectoryStorage):
    """A file that is gone is an exception."""

    breaks = "H18"

    def read(self, key: str) -> bytearray | None:
        data = super().read(key)
        if data is None:
            raise FileNotFoundError(key)
        return data


class ClearsInWordsOnly(Mutant, DirectoryStorage):
    """It says nothing, and does nothing."""

    breaks = "H19"

    def clear(self) -> None:
        pass


def hash_of(text: str) -> str:
    """A part of a name of a directory."""
    return text.replace("/", "-")
