"""Faults that show when threads, instances or processes share a store, and each has something of its own."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from kvloom import Buffer, Buffers, Entry
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.backend import DirectoryBackend
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend


class CachesForEachThread(Mutant, DirectoryBackend):
    """A thread reads its own cached blob until it puts or deletes something itself."""

    breaks = "B43"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._mine = threading.local()

    def get(self, key: str) -> Buffer | None:
        recent: dict[str, Buffer | None] = self._mine.__dict__
        if key not in recent:
            recent[key] = super().get(key)
        return recent[key]

    def put(self, key: str, blob: Buffers) -> None:
        super().put(key, blob)
        self._mine.__dict__.pop(key, None)

    def delete(self, key: str) -> None:
        super().delete(key)
        self._mine.__dict__.pop(key, None)


class CachesForTheProcess(Mutant, DirectoryBackend):
    """Caches for all instances of the process, and misses changes by other processes."""

    breaks = "B46"
    _recent: ClassVar[dict[Path, Buffer | None]] = {}

    def get(self, key: str) -> Buffer | None:
        file = self._file(key)
        if self._recent.get(file) is None:
            self._recent[file] = super().get(key)
        return self._recent[file]

    def put(self, key: str, blob: Buffers) -> None:
        super().put(key, blob)
        self._recent.pop(self._file(key), None)

    def delete(self, key: str) -> None:
        super().delete(key)
        self._recent.pop(self._file(key), None)


class RemembersMissesForTheProcess(Mutant, DirectoryBackend):
    """So as not to ask the store for what is not there."""

    breaks = "B46"
    _absent: ClassVar[set[Path]] = set()

    def get(self, key: str) -> Buffer | None:
        file = self._file(key)
        blob = None if file in self._absent else super().get(key)
        if blob is None:
            self._absent.add(file)
        return blob

    def put(self, key: str, blob: Buffers) -> None:
        super().put(key, blob)
        self._absent.discard(self._file(key))


class CountsItsRows(Mutant, DirectoryBackend):
    """From as many as there were when it was opened: two that are open at a time count to the same numbers."""

    breaks = "B10"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._next = sum(1 for _ in self._path.glob("+row-*"))
        self._lock = threading.Lock()

    def put(self, key: str, blob: Buffers) -> None:
        with self._lock:
            self._next += 1
            row = self._path / f"+row-{self._next}"
        os.replace(self._draft(blob), row)
        super().put(key, [row.name.encode()])

    def get(self, key: str) -> Buffer | None:
        row = super().get(key)
        return None if row is None else (self._path / bytes(row).decode()).read_bytes()


class CountsItsRowsWithoutALock(Mutant, CompleteDirectoryBackend):
    """In a file: two threads read the same number."""

    breaks = "B10"

    def put(self, key: str, blob: Buffers) -> None:
        counter = self._path / "+counter"
        number = int(counter.read_text()) if counter.exists() else 0
        os.replace(self._draft([b"%d" % (number + 1)]), counter)
        row = self._path / f"+row-{number}"
        os.replace(self._draft(blob), row)
        super().put(key, [row.name.encode()])

    def get(self, key: str) -> Buffer | None:
        row = super().get(key)
        return None if row is None else (self._path / bytes(row).decode()).read_bytes()


class JoinsInOneBuffer(Mutant, DirectoryBackend):
    """All puts share one buffer: it is made once, and large enough."""

    breaks = "B10"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._scratch = memoryview(bytearray(8 << 20))

    def put(self, key: str, blob: Buffers) -> None:
        size = 0
        for part in blob:
            self._scratch[size : size + len(part)] = part
            size += len(part)
        super().put(key, [self._scratch[:size]])


class AsksItsTableTwice(Mutant, DirectoryBackend):
    """First for the row's existence, then for the row: another thread may have deleted it in between."""

    breaks = "B11"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._recent: dict[str, bytes] = {}

    def put(self, key: str, blob: Buffers) -> None:
        self._recent[key] = b"".join(blob)
        super().put(key, blob)

    def get(self, key: str) -> Buffer | None:
        if self._is_recent(key):
            return self._recent[key]
        return super().get(key)

    def delete(self, key: str) -> None:
        self._recent.pop(key, None)
        super().delete(key)

    def _is_recent(self, key: str) -> bool:
        return key in self._recent


class LooksBeforeItOpens(Mutant, DirectoryBackend):
    """Looks for the file before it opens it; another thread may delete it in between."""

    breaks = "B11"

    def get(self, key: str) -> Buffer | None:
        return self._file(key).read_bytes() if self._file(key).exists() else None


class WritesTheRowBeforeTheBlob(Mutant, DirectoryBackend):
    """Writes the row before the blob; a kill in between leaves a row without a blob."""

    breaks = "B36"

    def put(self, key: str, blob: Buffers) -> None:
        whole = b"".join(blob)
        os.replace(self._draft([json.dumps([key, len(whole)]).encode()]), self._row(key))
        super().put(key, [whole])

    def delete(self, key: str) -> None:
        super().delete(key)
        self._row(key).unlink(missing_ok=True)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        for row in self._path.glob("+row-*"):
            with contextlib.suppress(FileNotFoundError):
                key, size = json.loads(row.read_bytes())
                if key.startswith(prefix):
                    yield Entry(key, size, 0.0)

    def _row(self, key: str) -> Path:
        return self._path / f"+row-{self._file(key).name}"


class ReplacesInTwoSteps(Mutant, DirectoryBackend):
    """Replaces the length and the blob in two steps; a kill in between leaves a blob that is cut."""

    breaks = "B36"

    def put(self, key: str, blob: Buffers) -> None:
        whole = b"".join(blob)
        length = self._draft([b"%d" % len(whole)])
        super().put(key, [whole])
        os.replace(length, self._length(key))

    def get(self, key: str) -> Buffer | None:
        blob = super().get(key)
        try:
            return None if blob is None else blob[: int(self._length(key).read_bytes())]
        except FileNotFoundError:
            return None

    def contains(self, key: str) -> bool:
        return super().contains(key) and self._length(key).exists()

    def _length(self, key: str) -> Path:
        return self._path / f"+length-{self._file(key).name}"


class IdentityIsAsWritten(Mutant, CompleteDirectoryBackend):
    """By another path it is another store."""

    breaks = "B27"

    def identity(self) -> str | None:
        return os.path.abspath(self._path)


class SwallowsWriteErrors(Mutant, DirectoryBackend):
    """Raises errors of the blob, and hides errors of the disk."""

    breaks = "B45"

    def put(self, key: str, blob: Buffers) -> None:
        whole = b"".join(blob)
        with contextlib.suppress(OSError):
            super().put(key, [whole])


class WritesBehind(Mutant, DirectoryBackend):
    """Writes on a thread, waits for it, and ignores its errors."""

    breaks = "B45"

    def put(self, key: str, blob: Buffers) -> None:
        whole, failed = b"".join(blob), list[Any]()

        def write() -> None:
            try:
                super(WritesBehind, self).put(key, [whole])
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()


class CutsAt16MiB(Mutant, DirectoryBackend):
    """The most that one value of a MEDIUMBLOB may have."""

    breaks = "B44"

    def put(self, key: str, blob: Buffers) -> None:
        super().put(key, [b"".join(blob)[: (16 << 20) - 1]])


class ReadsOneMessage(Mutant, CompleteDirectoryBackend):
    """The message's length has 24 bits."""

    breaks = "B44"

    def get(self, key: str) -> Buffer | None:
        blob = super().get(key)
        return None if blob is None else blob[: (16 << 20) - 1]


class HoldsForTheThread(Mutant, DirectoryBackend):
    """Gives the right to the thread that asked; another one of the same instance finds it taken."""

    breaks = "B28"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._mine = threading.local()

    def hold(self, name: str) -> bool:
        mine = self._mine.__dict__.setdefault("rights", {})
        self._rights, all_rights = mine, self._rights
        held = super().hold(name)
        self._rights = {**all_rights, **mine}
        return held


class ReadsByOneOpenFile(Mutant, DirectoryBackend):
    """Under a lock, which a forked child has a copy of; the place in the file it shares."""

    breaks = "B23"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._lock = threading.Lock()
        self._log = os.open(self._path / "+log", os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def put(self, key: str, blob: Buffers) -> None:
        whole = b"".join(blob)
        with self._lock:
            end = os.lseek(self._log, 0, os.SEEK_END)
            os.write(self._log, whole)
        super().put(key, [b"%d %d" % (end, len(whole))])

    def get(self, key: str) -> Buffer | None:
        row = super().get(key)
        if row is None:
            return None
        start, size = map(int, bytes(row).split())
        with self._lock:
            os.lseek(self._log, start, os.SEEK_SET)
            return os.read(self._log, size)

    def close(self) -> None:
        if self._log >= 0:
            os.close(self._log)
            self._log = -1
