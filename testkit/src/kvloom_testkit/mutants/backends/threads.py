"""Faults that show when threads meet, or when many reads are one call."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from kvloom import BackendError, Buffer, Buffers, Entry, ReadDone, Sink
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.backend import DirectoryBackend
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend


class WritesInPlace(Mutant, DirectoryBackend):
    """Readers see the file while it is being written."""

    breaks = "B09"

    def put(self, key: str, blob: Buffers) -> None:
        whole = b"".join(blob)
        self._file(key).write_bytes(whole)


class AsksForTheSizeOfAnother(Mutant, CompleteDirectoryBackend):
    """The size is that of one version, the bytes are those of the next."""

    breaks = "B09"

    def get_into(self, key: str, sink: Sink) -> bool:
        try:
            memory = sink.reserve(self._file(key).stat().st_size)
            data = self._file(key).read_bytes()[: len(memory)]
        except FileNotFoundError:
            return False
        memory[: len(data)] = data
        sink.filled(len(memory))
        return True


class SharesItsScratchFile(Mutant, DirectoryBackend):
    """Every writer of the process writes to the same one."""

    breaks = "B10"

    def _draft(self, blob: Buffers) -> str:
        name = str(self._path / f"+{os.getpid()}")
        with open(name, "wb") as file:
            file.writelines(blob)
        return name


class KeepsAnIndexWithoutALock(Mutant, DirectoryBackend):
    """Reads the table, adds to it and writes it back: what somebody else added meanwhile is lost."""

    breaks = "B10"

    def put(self, key: str, blob: Buffers) -> None:
        index = self._index()
        super().put(key, blob)
        super().put("index", [json.dumps([*index, key]).encode()])

    def get(self, key: str) -> Buffer | None:
        return super().get(key) if key in self._index() else None

    def _index(self) -> list[str]:
        found: list[str] = json.loads(super().get("index") or b"[]")
        return found


class AsksAndThenOpens(Mutant, DirectoryBackend):
    """The file may be gone a step later."""

    breaks = "B11"

    def get(self, key: str) -> Buffer | None:
        there = self.contains(key)
        time.sleep(0.0002)  # the way to a server and back
        return self._file(key).read_bytes() if there else None


class AsksAndThenCreates(Mutant, CompleteDirectoryBackend):
    """Asks before it creates, so that two threads may both create."""

    breaks = "B20"

    def create(self, key: str, blob: Buffers) -> bool:
        if self.contains(key):
            return False
        self.put(key, blob)
        return True


class CreatesOverWhatIsThere(Mutant, CompleteDirectoryBackend):
    """Returns False from `create`, but replaces the blob."""

    breaks = "B20"

    def create(self, key: str, blob: Buffers) -> bool:
        return super().create(key, blob) or bool(self.put(key, blob))  # type: ignore[func-returns-value]


class BelongsToItsThread(Mutant, DirectoryBackend):
    """Like a connection that may only be used where it was made."""

    breaks = "B33"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._thread = threading.get_ident()

    def get(self, key: str) -> Buffer | None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("used in another thread than it was made in")
        return super().get(key)


class GoesThroughATableThatChanges(Mutant, DirectoryBackend):
    """A dictionary of keys that is gone through while others change it."""

    breaks = "B33"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._known: dict[str, None] = {}

    def put(self, key: str, blob: Buffers) -> None:
        super().put(key, blob)
        self._known[key] = None

    def delete(self, key: str) -> None:
        super().delete(key)
        self._known.pop(key, None)

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        there = {key for key in self._known if self.contains(key)}
        return [key in there for key in keys]


class AsksForTheSizeOfWhatIsGone(Mutant, DirectoryBackend):
    """Between being listed and being asked about, a file may be deleted."""

    breaks = "B18"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        for file in list(self._path.iterdir()):
            status = file.stat()
            key = file.name.replace("=", "/")
            if key.startswith(prefix) and not key.startswith("+"):
                yield Entry(key, status.st_size, status.st_mtime)


class PagesByOffset(Mutant, DirectoryBackend):
    """A deletion on an earlier page moves the rest of the listing up."""

    breaks = "B18"

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        offset = 0
        while page := sorted(super().scan(prefix), reverse=True)[offset : offset + 10]:
            yield from page
            offset += len(page)


class BatchReportsOnAnotherThread(Mutant, CompleteDirectoryBackend):
    """The outcomes come from the threads that read."""

    breaks = "B50"

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(super().get_many_into, requests, done).result()


class _Deaf:
    """Ignores the errors of `Sink.filled`."""

    def __init__(self, sink: Sink) -> None:
        self.reserve = sink.reserve
        self._filled = sink.filled

    def filled(self, num_bytes: int) -> None:
        with suppress(BackendError):
            self._filled(num_bytes)


class BatchDoesNotHearOfDamage(Mutant, CompleteDirectoryBackend):
    """Reports a blob as read although its sink has refused the bytes."""

    breaks = "B50"

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        super().get_many_into([(key, _Deaf(sink)) for key, sink in requests], done)


class _Scratch(CompleteDirectoryBackend):
    """Reads blobs into memory that all threads share, and copies them from there."""

    def read_by_way_of_scratch(self, key: str, sink: Sink) -> bool:
        blob = super().get(key)
        if blob is None:
            return False
        scratch: bytearray = self.__dict__.setdefault("scratch", bytearray(1 << 20))
        memory = sink.reserve(len(blob))
        scratch[: len(blob)] = blob
        time.sleep(0)
        memory[:] = scratch[: len(blob)]
        sink.filled(len(blob))
        return True


class ReadsShareAScratchBuffer(Mutant, _Scratch):
    """One reader gets what another has just read."""

    breaks = "B56"

    def get_into(self, key: str, sink: Sink) -> bool:
        return self.read_by_way_of_scratch(key, sink)


class BatchesShareAScratchBuffer(Mutant, _Scratch):
    """One batch gets what another has just read."""

    breaks = "B56"

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        for number, (key, sink) in enumerate(requests):
            try:
                outcome: bool | Exception = self.read_by_way_of_scratch(key, sink)
            except Exception as error:
                outcome = error
            done(number, outcome)
