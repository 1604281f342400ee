"""Faults in what comes back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.sglang import DirectoryStorage


class NeedsAServer(Mutant, DirectoryStorage):
    """It wants a server that is not there."""

    breaks = "H01"

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        raise ConnectionError("no server")


class TakesRowsForPages(Mutant, DirectoryStorage):
    """Pages of the pool are counted by the order of their rows."""

    breaks = "H02"

    def rows(self, indices: torch.Tensor) -> list[int]:
        return sorted(super().rows(indices))


class WritesTheNextPage(Mutant, DirectoryStorage):
    """The page behind the one that is loaded is written, too."""

    breaks = "H03"

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        for row in self.rows(host_indices):
            self.mem_pool_host.page((row + self.mem_pool_host.page_size) % self.mem_pool_host.size).zero_()
        return super().batch_get_v1(keys, host_indices, extra_info)


class CountsAll(Mutant, DirectoryStorage):
    """All pages that are there are counted."""

    breaks = "H04"

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return sum(self.exists(key) for key in keys)


class OneAnswerForAll(Mutant, DirectoryStorage):
    """Pages are all said to be there if the first one is."""

    breaks = "H05"

    def batch_get(
        self, keys: list[str], target_locations: Sequence[Any] = (), target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        found = super().batch_get(keys, target_locations, target_sizes)
        return list(target_locations) if found[0] is not None else found


class RefusesTwice(Mutant, DirectoryStorage):
    """A page that is there cannot be stored."""

    breaks = "H06"

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return not self.exists(key) and super().set(key, value)


class KeysOfThisProcess(Mutant, DirectoryStorage):
    """Keys are made by `hash()`."""

    breaks = "H07"

    def path(self, key: str) -> Path:
        return self.folder / f"{hash(key) % 2**64:x}"


class OneDraftForAll(Mutant, DirectoryStorage):
    """Files are drafted under one name, which every process uses."""

    breaks = "H08"

    def draft(self, key: str) -> Path:
        return self.folder / "draft"


class OneDraftForEachPage(Mutant, DirectoryStorage):
    """The draft of a page has one name, which every process uses that writes the same page."""

    breaks = "H08"

    def draft(self, key: str) -> Path:
        return self.folder / f"{key}.draft"


class WritesInPlace(Mutant, DirectoryStorage):
    """A file is there before its bytes are, and what is in it is taken for all of it."""

    breaks = "H08"

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        self.write(key, value.contiguous().view(torch.uint8).numpy().tobytes())
        return True

    def write(self, key: str, data: bytes) -> None:
        self.path(key).write_bytes(data)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        if not self.exists(key):
            return None
        data = bytearray(self.path(key).read_bytes())
        page: torch.Tensor = target_location
        page.view(torch.uint8)[: len(data)] = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
        return page


class TrustsDraftsOfOthers(WritesInPlace):
    """A page's draft has one name for all processes, and that another was first is no error."""

    breaks = "H08"

    def write(self, key: str, data: bytes) -> None:
        draft = self.folder / f"{key}.draft"
        draft.write_bytes(data)
        with contextlib.suppress(FileNotFoundError):
            draft.replace(self.path(key))


class OneBufferForBoth(Mutant, DirectoryStorage):
    """Pages that are stored and loaded pass through one buffer."""

    breaks = "H09"
    buffer: ClassVar[dict[str, Any]] = {}

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        self.buffer["page"] = value.clone()
        time.sleep(0.0001)
        return super().set(key, self.buffer["page"])

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        self.buffer["page"] = super().get(key, target_location)
        time.sleep(0.0001)
        page: torch.Tensor | None = self.buffer["page"]
        return page


class LeavesFilesOpen(Mutant, DirectoryStorage):
    """A file is opened for each page."""

    breaks = "H20"
    open: ClassVar[list[Any]] = []

    def read(self, key: str) -> bytearray | None:
        self.open.append(open("/dev/null"))  # noqa: SIM115
        return super().read(key)


class AsksFarAway(Mutant, DirectoryStorage):
    """Each page is a slow round trip."""

    breaks = "H21"

    def exists(self, key: str) -> bool:
        time.sleep(0.2)
        return super().exists(key)
