"""Faults of listings, and those that show with many blobs."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import ClassVar

from kvloom import Buffer, Buffers, Entry, StorageBackend, WriteDone
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.backend import DirectoryBackend
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend


class TakesThePrefixForADirectory(Mutant, DirectoryBackend):
    """A prefix that ends in the middle of a part finds nothing."""

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


class FindsThePrefixAnywhere(Mutant, DirectoryBackend):
    """Like `in`, and LIKE with a percent sign on both sides."""

    breaks = "B16"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry for entry in super().scan() if prefix in entry.key)


class ListsFileNames(Mutant, DirectoryBackend):
    """File names are not the keys."""

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
    """Like the command of that name."""

    breaks = "B29"

    def touch_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._file(key).touch()


class TouchIsWriting(Mutant, CompleteDirectoryBackend):
    """A blob that is used is then never too old for its ttl."""

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
    """Like SQL's LIKE."""

    breaks = "B16"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry for entry in super().scan() if entry.key.lower().startswith(prefix.lower()))


class TakesThePrefixForAPattern(Mutant, DirectoryBackend):
    """A point stands for anything."""

    breaks = "B16"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry for entry in super().scan() if re.match(prefix, entry.key))


class UnderscoresStandForAnything(Mutant, DirectoryBackend):
    """Like SQL's LIKE and GLOB's relatives."""

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


class SkipsHiddenFiles(Mutant, DirectoryBackend):
    """A key may have such a name."""

    breaks = "B16"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry for entry in super().scan(prefix) if not entry.key.rpartition("/")[2].startswith("."))


class SkipsWhatLooksLikeADraft(Mutant, DirectoryBackend):
    """A key may end with `.tmp`."""

    breaks = "B16"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry for entry in super().scan(prefix) if not entry.key.endswith(".tmp"))


class ReadingIsWriting(Mutant, DirectoryBackend):
    """So that what was used last is evicted last; and what is used never expires."""

    breaks = "B17"

    def get(self, key: str) -> Buffer | None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._file(key), (time.time(), time.time()))
        return super().get(key)


class CachesItsListing(Mutant, DirectoryBackend):
    """Until it puts or deletes something itself."""

    breaks = "B22"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._listings: dict[str, list[Entry]] = {}

    def put(self, key: str, blob: Buffers) -> None:
        super().put(key, blob)
        self._listings.clear()

    def delete(self, key: str) -> None:
        super().delete(key)
        self._listings.clear()

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        if prefix not in self._listings:
            self._listings[prefix] = list(super().scan(prefix))
        return iter(self._listings[prefix])


class DoesNotLookSizesUp(Mutant, DirectoryBackend):
    """The listing wants one, so there is one."""

    breaks = "B41"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry._replace(bytes=1) for entry in super().scan(prefix))


class KeepsTheFirstSize(Mutant, DirectoryBackend):
    """A table of sizes whose rows are inserted, and ignored if they are there."""

    breaks = "B41"
    _sizes: ClassVar[dict[str, int]] = {}

    def put(self, key: str, blob: Buffers) -> None:
        self._sizes.setdefault(key, sum(map(len, blob)))
        super().put(key, blob)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry._replace(bytes=self._sizes[entry.key]) for entry in super().scan(prefix))


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


class ListsFourThousand(Mutant, DirectoryBackend):
    """A page is as long as that, and there is only one."""

    breaks = "B38"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return islice(super().scan(prefix), 4096)


class DeletesAThousand(Mutant, DirectoryBackend):
    """A limit that a server may have for one request."""

    breaks = "B38"

    def delete_many(self, keys: Sequence[str]) -> None:
        super().delete_many(keys[:1000])


class KeepsWholeBatches(Mutant, DirectoryBackend):
    """The rest at the end is never sent once there was a batch."""

    breaks = "B38"

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        whole = len(requests) // 500 * 500 or len(requests)
        super().put_many(requests[:whole], done)
        for number in range(whole, len(requests)):
            done(number, None)
