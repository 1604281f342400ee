"""Files of a memory file system, mapped into this process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from kvloom_native.files import library


class _Mapping(ctypes.Structure):
    _fields_ = (
        ("at", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
        ("inode", ctypes.c_uint64),
        ("changed_seconds", ctypes.c_int64),
        ("changed_nanoseconds", ctypes.c_int64),
        ("slot", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("process", ctypes.c_int64),
        ("path", ctypes.c_char_p),
    )


def is_memory(directory: str) -> bool:
    """Return whether files in a directory are memory: a tmpfs, with the native library to map them."""
    found = library()
    return found is not None and found.kvloom_is_memory(os.fsencode(directory)) != 0


class MappedFile:
    """A whole file as memory of this process, until `close`. Use only where `is_memory` says yes.

    If the file becomes shorter while it is read, its missing pages read as zeros, and the process does not end: ask
    `current` afterwards. A forked child does not have it.
    """

    def __init__(self, path: str, most_bytes: int) -> None:
        """Raises OSError if there is no such file, or it cannot be mapped; one that is empty or longer cannot."""
        found = library()
        assert found is not None, "without the library, read the file"
        self._library = found
        self._path = os.fsencode(path)
        self._mapping = _Mapping()
        self._address = ctypes.addressof(self._mapping)
        found.kvloom_map(ctypes.byref(self._mapping), self._path, ctypes.c_uint64(most_bytes))
        if self._mapping.error:
            code = max(0, self._mapping.error)
            raise OSError(code, os.strerror(code) if code else "cannot be mapped", path)
        memory = (ctypes.c_char * self._mapping.size).from_address(self._mapping.at)
        self.view = memoryview(memory).cast("B")
        """All of the file. Not to be touched after `close`."""

    def current(self) -> bool:
        """Return whether this very file still lies at its path, unchanged, and nothing else was read from `view`."""
        return are_current([self])[0]

    def gone(self) -> bool:
        """Return whether this file lies at its path no more: deleted, or another took its place."""
        try:
            status = os.lstat(self._path)
        except OSError:
            return True
        return (status.st_dev, status.st_ino) != (self._mapping.device, self._mapping.inode)

    def close(self) -> None:
        """Unmap it. Idempotent."""
        self._library.kvloom_unmap(ctypes.byref(self._mapping))


def are_current(files: Sequence[MappedFile]) -> list[bool]:
    """`current` of each, by one call."""
    found = library()
    assert found is not None, "without the library, nothing is mapped"
    answers = ctypes.create_string_buffer(len(files))
    addresses = (ctypes.c_void_p * len(files))(*[file._address for file in files])
    found.kvloom_mappings_are_current(addresses, len(files), answers)
    return [*map(bool, answers.raw)]
