"""The same directory with everything that a backend may do besides: what optional requirements are tried on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from kvloom import Buffers, Entry, MappedBlob, Sink
from kvloom_testkit.reference.backend import DirectoryBackend


class Mapped:
    """A blob as memory; here a copy of the file, so that what is written to it stays the caller's own."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._was = _version(os.fstat(file.fileno()))
            self.view = memoryview(bytearray(file.read()))
        self._path = path

    def current(self) -> bool:
        try:
            return _version(os.stat(self._path)) in (self._was,)
        except FileNotFoundError:
            return False

    def gone(self) -> bool:
        return not self.current()  # what is there is never changed

    def close(self) -> None:
        self.view = memoryview(b"")


def _version(status: os.stat_result) -> tuple[int, ...]:
    """Return values that differ between two versions of a blob: a new one is another file."""
    return status.st_ino, status.st_mtime_ns, status.st_size


class CompleteDirectoryBackend(DirectoryBackend):
    """Reads straight into the caller's memory, maps, creates, tells its identity and notes uses."""

    type = "kit_complete_directory"

    def get_into(self, key: str, sink: Sink) -> bool:
        with self._opened(key) as file:
            if file is None:
                return False
            memory = sink.reserve(os.fstat(file.fileno()).st_size)
            self._fill(file, memory)
            sink.filled(len(memory))
        return True

    def map(self, key: str, most_bytes: int) -> MappedBlob | None:
        file = self._file(key)
        try:
            return Mapped(file) if file.stat().st_size <= most_bytes else None
        except FileNotFoundError:
            return None

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        with self._opened(key) as file:
            if file is None or os.fstat(file.fileno()).st_size < offset + len(into):
                return False
            file.seek(offset)
            self._fill(file, into)
        return True

    def create(self, key: str, blob: Buffers) -> bool:
        draft = self._draft(blob)
        try:
            os.link(draft, self._file(key))
        except FileExistsError:
            return False
        finally:
            os.unlink(draft)
        return True

    def identity(self) -> str | None:
        return os.path.realpath(self._path)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        for entry in super().scan(prefix):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                yield entry._replace(used=self._file(entry.key).stat().st_atime)

    def touch_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._file(key), ns=(time.time_ns(), self._file(key).stat().st_mtime_ns))

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[BinaryIO | None]:
        """The file of a key; None if there is none."""
        try:
            file = open(self._file(key), "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            yield None
            return
        with file:
            yield file

    @staticmethod
    def _fill(file: BinaryIO, into: memoryview) -> None:
        done = 0
        while done < len(into):
            got = file.readinto(into[done:])  # type: ignore[attr-defined]
            if not got:
                raise OSError("the file ends too early")
            done += got
