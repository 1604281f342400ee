"""Reads of untrusted blobs and files, each with a maximum size."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from kvloom.errors import CorruptBlobError

if TYPE_CHECKING:
    from pathlib import Path

    from kvloom.contracts.storage import StorageBackend

_LOGGED = 300


def get_at_most(backend: StorageBackend, key: str, most: int) -> bytearray | None:
    """A blob of up to `most` bytes; None if there is none. Raises CorruptBlobError, before it is read, if it is longer.

    A backend with no `get_into` of its own reads it before its length is known here.
    """
    memory = Memory(most)
    return memory.content if backend.get_into(key, memory) else None


def text_of(path: Path, most: int) -> str:
    """A file of UTF-8. Raises OSError, before more is read, if it has more than `most` bytes, and UnicodeDecodeError.

    A device may give bytes without end, and a file with holes has no size worth its name.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes")
    return content.decode()


class Memory:
    """A sink with a maximum size."""

    def __init__(self, most: int) -> None:
        self.max_bytes = most
        self.content = bytearray()

    def reserve(self, num_bytes: int) -> memoryview:
        if num_bytes > self.max_bytes:
            raise CorruptBlobError(f"{num_bytes} bytes where at most {self.max_bytes} belong")
        self.content = bytearray(num_bytes)
        return memoryview(self.content)

    def filled(self, num_bytes: int) -> None:
        pass


def one_line(text: object) -> str:
    """A text that may come from outside, for the log: printable ASCII, and cut."""
    said = str(text)
    cut = said[:_LOGGED].encode("unicode_escape").decode("ascii")
    return cut if len(said) <= _LOGGED else f"{cut}..."
