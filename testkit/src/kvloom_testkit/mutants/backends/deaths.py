"""Faults that show when a process is killed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from kvloom import Buffer, Buffers, Entry
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.backend import DirectoryBackend
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend


class LocksReadersOut(Mutant, DirectoryBackend):
    """Writes in place and locks readers out meanwhile; a killed process leaves half a blob."""

    breaks = "B36"

    def put(self, key: str, blob: Buffers) -> None:
        with open(os.open(self._file(key), os.O_RDWR | os.O_CREAT), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                file.writelines(blob)
                file.truncate()
            except BaseException:
                self.delete(key)
                raise

    def get(self, key: str) -> Buffer | None:
        try:
            with self._file(key).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                return file.read()
        except FileNotFoundError:
            return None


class WritesTheIndexFirst(Mutant, DirectoryBackend):
    """Replaces the old version in the index before the new one is written."""

    breaks = "B36"

    def put(self, key: str, blob: Buffers) -> None:
        self.delete(key)
        row = self._draft([json.dumps([key, sum(map(len, blob))]).encode()])
        os.replace(row, self._row(key))
        super().put(key, blob)

    def delete(self, key: str) -> None:
        super().delete(key)
        self._row(key).unlink(missing_ok=True)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        for row in self._path.glob("+row-*"):
            key, size = json.loads(row.read_bytes())
            if key.startswith(prefix):
                yield Entry(key, size, 0.0)

    def _row(self, key: str) -> Path:
        return self._path / f"+row-{self._file(key).name}"


class LeavesItsLock(Mutant, DirectoryBackend):
    """A file that is there while the store is open: after a kill, somebody has to remove it by hand."""

    breaks = "B36"
    shared = False

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._lock = self._path / "+lock"
        self._lock.touch(exist_ok=False)

    def close(self) -> None:
        self._lock.unlink(missing_ok=True)


class DraftsUnderOneName(Mutant, DirectoryBackend):
    """A process killed while writing leaves the draft, and that key can never be put again."""

    breaks = "B36"

    def put(self, key: str, blob: Buffers) -> None:
        draft = self._path / f"+draft-{self._file(key).name}"
        try:
            with draft.open("xb") as file:
                file.writelines(blob)
            draft.replace(self._file(key))
        except FileExistsError:
            raise
        except BaseException:
            draft.unlink()
            raise


class KeepsTheRightsOfTheDead(Mutant, CompleteDirectoryBackend):
    """Grants the right by a file, which stays for ever if its holder is killed."""

    breaks = "B37"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._pid = os.getpid()

    def hold(self, name: str) -> bool:
        if name not in self._rights:
            try:
                self._rights[name] = os.open(self._right(name), os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                return False
        return True

    def close(self) -> None:
        for name in self._rights if self._pid == os.getpid() else ():
            self._right(name).unlink()
        super().close()

    def _right(self, name: str) -> Path:
        return self._path / f"+hold-{name}"


class HoldsInATable(Mutant, CompleteDirectoryBackend):
    """A table of this process: another process has its own."""

    breaks = "B37"
    _holders: ClassVar[dict[tuple[Path, str], int]] = {}

    def hold(self, name: str) -> bool:
        return self._holders.setdefault((self._path, name), id(self)) == id(self)

    def close(self) -> None:
        for right, holder in tuple(self._holders.items()):
            if holder == id(self):
                del self._holders[right]


class UnlocksWhatItInherited(Mutant, CompleteDirectoryBackend):
    """A forked child has a copy of the lock, and its `close` is everybody's."""

    breaks = "B37"

    def close(self) -> None:
        for number in self._rights.values():
            fcntl.flock(number, fcntl.LOCK_UN)
        super().close()


class LocksAsPosixDoes(Mutant, CompleteDirectoryBackend):
    """Uses POSIX locks: closing the file anywhere in the process releases the lock."""

    breaks = "B37"
    _holders: ClassVar[dict[tuple[Path, str], int]] = {}

    def hold(self, name: str) -> bool:
        number = os.open(self._path / f"+hold-{name}", os.O_CREAT | os.O_RDWR)
        holder = self._holders.setdefault((self._path, name), id(self))
        if holder != id(self):
            os.close(number)
            return False
        try:
            fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(number)
            return False
        self._rights.setdefault(name, number)
        return True

    def close(self) -> None:
        for right, holder in tuple(self._holders.items()):
            if holder == id(self):
                del self._holders[right]
        super().close()
