"""Faults of listings."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import ClassVar

from kvloom import Buffers, Entry, StorageBackend
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


class TouchesEverything(Mutant, CompleteDirectoryBackend):
    """An update without a `where`."""

    breaks = "B29"

    def touch_many(self, keys: Sequence[str]) -> None:
        if keys:
            super().touch_many([entry.key for entry in self.scan()])


class IgnoresLetterCaseInPrefixes(Mutant, DirectoryBackend):
    """As SQL's LIKE does."""

    breaks = "B16"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry for entry in super().scan() if entry.key.lower().startswith(prefix.lower()))


class TakesThePrefixForAPattern(Mutant, DirectoryBackend):
    """A point stands for anything."""

    breaks = "B16"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry for entry in super().scan() if re.match(prefix, entry.key))


class UnderscoresStandForAnything(Mutant, DirectoryBackend):
    """As in SQL's LIKE and GLOB's relatives."""

    breaks = "B16"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        pattern = ".".join(map(re.escape, prefix.split("_")))
        return (entry for entry in super().scan() if re.match(pattern, entry.key))


class KeepsTheFirstTime(Mutant, DirectoryBackend):
    """A table whose row is updated without its time: a chunk that was stored again is as old as ever."""

    breaks = "B17"

    def put(self, key: str, blob: Buffers) -> None:
        old = [entry.modified for entry in self.scan(key) if entry.key == key]
        super().put(key, blob)
        if old:
            os.utime(self._file(key), (old[0], old[0]))


class DoesNotLookSizesUp(Mutant, DirectoryBackend):
    """The listing wants one, so there is one."""

    breaks = "B41"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry._replace(bytes=1) for entry in super().scan(prefix))


class CountsBlocks(Mutant, DirectoryBackend):
    """As `st_blocks` does."""

    breaks = "B41"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry._replace(bytes=-(-entry.bytes // 512)) for entry in super().scan(prefix))


class KeepsTheFirstSize(Mutant, DirectoryBackend):
    """A table of sizes whose rows are inserted, and ignored if they are there."""

    breaks = "B41"
    _sizes: ClassVar[dict[str, int]] = {}

    def put(self, key: str, blob: Buffers) -> None:
        self._sizes.setdefault(key, sum(map(len, blob)))
        super().put(key, blob)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry._replace(bytes=self._sizes[entry.key]) for entry in super().scan(prefix))


class LocksTheListing(Mutant, DirectoryBackend):
    """From its first entry to its last, whatever its reader does between them."""

    breaks = "B18"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._lock = threading.RLock()

    def put(self, key: str, blob: Buffers) -> None:
        with self._lock:
            super().put(key, blob)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        with self._lock:
            yield from super().scan(prefix)


class CannotListWhatItKeeps(Mutant, DirectoryBackend):
    """Nothing of it is found again in a tier that has a capacity."""

    breaks = "B35"
    scan = StorageBackend.scan


class ListsWhatItPutItself(Mutant, DirectoryBackend):
    """An index that is not kept."""

    breaks = "B35"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._mine: set[str] = set()

    def put(self, key: str, blob: Buffers) -> None:
        super().put(key, blob)
        self._mine.add(key)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry for entry in super().scan(prefix) if entry.key in self._mine)


class ListsAThousand(Mutant, DirectoryBackend):
    """The first page of them, and does not ask for the next."""

    breaks = "B38"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return islice(super().scan(prefix), 1000)


class DeletesAThousand(Mutant, DirectoryBackend):
    """As many as one request may name."""

    breaks = "B38"

    def delete_many(self, keys: Sequence[str]) -> None:
        super().delete_many(keys[:1000])


class KeepsWholeBatches(Mutant, DirectoryBackend):
    """What is left over at the end is never sent, once there was a batch."""

    breaks = "B38"

    def put_many(self, items: Iterable[tuple[str, Buffers]]) -> None:
        items = list(items)
        super().put_many(items[: len(items) // 500 * 500] or items)
