"""Faults that show with many blobs, and in how much is listed of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import ClassVar

from kvloom import Buffers, Entry, StorageBackend, WriteDone
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.backend import DirectoryBackend


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
