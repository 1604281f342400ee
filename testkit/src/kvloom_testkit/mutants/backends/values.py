"""Faults that one blob and one thread are enough for."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time

from kvloom import Buffer, Buffers
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.backend import DirectoryBackend
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend


class WritesOnlyTheFirstBuffer(Mutant, DirectoryBackend):
    """Forgets that a blob may be in several."""

    breaks = "B01"

    def put(self, key: str, blob: Buffers) -> None:
        super().put(key, blob[:1])


class TakesAShortReadForAll(Mutant, DirectoryBackend):
    """One call of the system need not read everything."""

    breaks = "B01"

    def get(self, key: str) -> Buffer | None:
        blob = super().get(key)
        return None if blob is None else blob[: 512 << 10]


class TakesAShortWriteForAll(Mutant, DirectoryBackend):
    """One call of the system need not write everything."""

    breaks = "B01"

    def put(self, key: str, blob: Buffers) -> None:
        super().put(key, [memoryview(part)[: 512 << 10] for part in blob])


class RaisesWhenThereIsNothing(Mutant, DirectoryBackend):
    """Lets the client's exception out."""

    breaks = "B02"

    def get(self, key: str) -> Buffer | None:
        return self._file(key).read_bytes()


class IsEmptyWhenThereIsNothing(Mutant, DirectoryBackend):
    """Like clients that have no None."""

    breaks = "B02"

    def get(self, key: str) -> Buffer | None:
        return super().get(key) or b""


class WritesOverWithoutCutting(Mutant, DirectoryBackend):
    """A shorter blob keeps the tail of the longer one before it."""

    breaks = "B03"

    def put(self, key: str, blob: Buffers) -> None:
        file = self._file(key)
        file.touch()
        with file.open("r+b") as stream:
            stream.writelines(blob)


class KeepsTheFirst(Mutant, DirectoryBackend):
    """Does not put what is there already."""

    breaks = "B03"

    def put(self, key: str, blob: Buffers) -> None:
        if not self.contains(key):
            super().put(key, blob)


class ComparesLengths(Mutant, DirectoryBackend):
    """A blob of equal length counts as stored."""

    breaks = "B03"

    def put(self, key: str, blob: Buffers) -> None:
        file = self._file(key)
        if not file.exists() or file.stat().st_size != sum(map(len, blob)):
            super().put(key, blob)


class DeletesOnlyWhatIsThere(Mutant, DirectoryBackend):
    """Lets the client's exception out."""

    breaks = "B04"

    def delete(self, key: str) -> None:
        self._file(key).unlink()


class DeletesTheWholeTenant(Mutant, DirectoryBackend):
    """Takes the key for a path, and removes what it is in."""

    breaks = "B04"

    def delete(self, key: str) -> None:
        for entry in self.scan(key.rpartition("/")[0]):
            super().delete(entry.key)


class AsksItsMemoryWhatThereIs(Mutant, DirectoryBackend):
    """A set that a new instance starts without."""

    breaks = "B05"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._known: set[str] = set()

    def put(self, key: str, blob: Buffers) -> None:
        super().put(key, blob)
        self._known.add(key)

    def contains(self, key: str) -> bool:
        return key in self._known


class HasWhatItDeleted(Mutant, DirectoryBackend):
    """Empties a file instead of removing it, and `contains` does not know."""

    breaks = "B05"

    def get(self, key: str) -> Buffer | None:
        return super().get(key) or None

    def delete(self, key: str) -> None:
        if self.contains(key):
            self._file(key).write_bytes(b"")


class WritesLater(Mutant, DirectoryBackend):
    """Keeps the buffers, and writes them when somebody asks."""

    breaks = "B06"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._late: dict[str, Buffers] = {}

    def put(self, key: str, blob: Buffers) -> None:
        self._late[key] = blob

    def get(self, key: str) -> Buffer | None:
        if key in self._late:
            super().put(key, self._late.pop(key))
        return super().get(key)


class WritesOnAThread(Mutant, DirectoryBackend):
    """Returns before the blob is written; `get` waits for it."""

    breaks = "B06"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._writing: dict[str, threading.Thread] = {}

    def put(self, key: str, blob: Buffers) -> None:
        self._writing[key] = threading.Thread(
            target=lambda: (time.sleep(0.02), super(WritesOnAThread, self).put(key, blob))
        )
        self._writing[key].start()

    def get(self, key: str) -> Buffer | None:
        if key in self._writing:
            self._writing.pop(key).join()
        return super().get(key)


class ReadsIntoOneBuffer(Mutant, DirectoryBackend):
    """The next `get` changes what this one returned."""

    breaks = "B07"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._buffer = bytearray(4 << 20)

    def get(self, key: str) -> Buffer | None:
        blob = super().get(key)
        if blob is None:
            return None
        self._buffer[: len(blob)] = blob
        return memoryview(self._buffer)[: len(blob)]


class ReturnsTheFileItself(Mutant, DirectoryBackend):
    """A view of the file, which the next `put` writes into."""

    breaks = "B07"

    def put(self, key: str, blob: Buffers) -> None:
        number = os.open(self._file(key), os.O_RDWR | os.O_CREAT)
        with open(number, "r+b") as file:
            file.writelines(blob)
            file.truncate()

    def get(self, key: str) -> Buffer | None:
        try:
            with self._file(key).open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        except FileNotFoundError:
            return None


class WritesPartByPart(Mutant, DirectoryBackend):
    """Writes part by part into the blob's own file; an interrupted put leaves half a blob."""

    breaks = "B12"

    def put(self, key: str, blob: Buffers) -> None:
        with self._file(key).open("wb") as file:
            file.writelines(blob)


class HidesThatAPutFailed(Mutant, DirectoryBackend):
    """It is only a cache, its author thought."""

    breaks = "B12"

    def put(self, key: str, blob: Buffers) -> None:
        with contextlib.suppress(OSError):
            super().put(key, blob)


class CachesWhatItWroteWrongly(Mutant, DirectoryBackend):
    """Its `get` is answered from memory, and never meets the file that its `put` has cut short."""

    breaks = "B34"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._recent: dict[str, bytes] = {}

    def put(self, key: str, blob: Buffers) -> None:
        self._recent[key] = b"".join(blob)
        super().put(key, [self._recent[key][:4096]])

    def get(self, key: str) -> Buffer | None:
        return self._recent.get(key) or super().get(key)

    def delete(self, key: str) -> None:
        self._recent.pop(key, None)
        super().delete(key)


class MissesWhatItCannotOpen(Mutant, DirectoryBackend):
    """Takes every error of opening a file for a miss; FileNotFoundError was meant."""

    breaks = "B47"

    def get(self, key: str) -> Buffer | None:
        try:
            return super().get(key)
        except OSError:
            return None


class MissesWhatItCannotOpenInParts(Mutant, CompleteDirectoryBackend):
    """Its other ways to read have an `except` of their own."""

    breaks = "B47"

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        try:
            return super().get_range(key, offset, into)
        except OSError:
            return False
