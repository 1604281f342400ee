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
    """A whole file as memory of this process, until `close`: see `map_files`.

    If the file becomes shorter while it is read, its missing pages read as zeros, and the process does not end: ask
    `current` afterwards. A forked child does not have it.
    """

    def __init__(self, library: ctypes.CDLL, mapping: _Mapping, path: bytes, held: object) -> None:
        """mapping: of this file. held: what it refers to."""
        self._library = library
        self._path = path
        self._mapping = mapping
        self._held = held
        self._address = ctypes.addressof(mapping)
        memory = (ctypes.c_char * mapping.size).from_address(mapping.at)
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


def map_files(files: Sequence[tuple[str, int]]) -> list[MappedFile | OSError]:
    """Map files, by one call: paths, and the most bytes that each may have. An empty one cannot be mapped.

    Use only where `is_memory` says yes. Raises ValueError for a path with a zero character in it.
    """
    native = library()
    assert native is not None, "without the library, read the files"
    paths = [os.fsencode(path) for path, _ in files]
    if any(0 in path for path in paths):
        raise ValueError("a path with a zero character in it")
    mappings = (_Mapping * len(files))()
    names = b"\0".join(paths) + b"\0"
    native.kvloom_map(mappings, len(files), names, (ctypes.c_uint64 * len(files))(*[most for _, most in files]))
    found: list[MappedFile | OSError] = []
    for path, mapping in zip(paths, mappings, strict=True):
        code = mapping.error
        if code:
            about = os.strerror(code) if code > 0 else "cannot be mapped"
            found.append(OSError(max(0, code), about, os.fsdecode(path)))
        else:
            found.append(MappedFile(native, mapping, path, names))
    return found
