"""Faults of listings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice

from kvloom import Entry
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.backend import DirectoryBackend
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend


class TakesThePrefixForADirectory(Mutant, DirectoryBackend):
    """What begins in the middle of a part is not found."""

    breaks = "B16"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return super().scan(prefix if prefix.endswith("/") or not prefix else f"{prefix}/")


class ListsOnePage(Mutant, DirectoryBackend):
    """The first hundred."""

    breaks = "B16"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return islice(super().scan(prefix), 100)


class IgnoresThePrefix(Mutant, DirectoryBackend):
    """And lists everything."""

    breaks = "B16"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return super().scan()


class ListsFileNames(Mutant, DirectoryBackend):
    """Which are not the keys."""

    breaks = "B16"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry._replace(key=self._file(entry.key).name) for entry in super().scan(prefix))


class KnowsNoSizes(Mutant, DirectoryBackend):
    """So that a capacity means nothing."""

    breaks = "B16"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry._replace(bytes=0) for entry in super().scan(prefix))


class SaysMilliseconds(Mutant, DirectoryBackend):
    """A thousand times too many."""

    breaks = "B17"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry._replace(modified=entry.modified * 1000) for entry in super().scan(prefix))


class CountsFromBoot(Mutant, DirectoryBackend):
    """A clock that other processes do not have."""

    breaks = "B17"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry._replace(modified=time.monotonic()) for entry in super().scan(prefix))


class TouchMakesAFile(Mutant, CompleteDirectoryBackend):
    """As the command of that name does."""

    breaks = "B29"

    def touch_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._file(key).touch()


class TouchIsWriting(Mutant, CompleteDirectoryBackend):
    """What is used is never too old for its ttl then."""

    breaks = "B29"

    def touch_many(self, keys: Sequence[str]) -> None:
        for key in filter(self.contains, keys):
            self._file(key).touch()


class TouchesOnlyWhatIsThere(Mutant, CompleteDirectoryBackend):
    """And raises for the rest."""

    breaks = "B29"

    def touch_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._file(key).stat()
        super().touch_many(keys)
