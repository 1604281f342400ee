"""Files that are opened by one call and read by another: the memory for them is reserved in between."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

from kvloom import native

NOT_A_FILE = -1
"""In `errors`: there is something else than a regular file."""
TOO_SHORT = -2
"""In `errors`: the file has become shorter than it was when it was opened."""


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None if there is none that can be used."""
    found = native.own_library()
    if found is not None:
        for function in (
            found.kvloom_files_open, found.kvloom_files_read, found.kvloom_map, found.kvloom_mappings_are_current,
            found.kvloom_unmap,
        ):  # fmt: skip
            function.restype = None
    return found


Mode = Literal["never", "auto", "always", "sequential"]
_MODES: dict[Mode, int] = {"never": 0, "auto": 1, "always": 2, "sequential": 3}


class _File(ctypes.Structure):
    _fields_ = (
        ("fd", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("size", ctypes.c_uint64),
        ("into", ctypes.c_void_p),
        ("filled", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
    )


_FILLED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)


class Files:
    """Files open for reading, until `read` or `close`. Use only where `kvloom_native.library()` gives one."""

    def __init__(self, paths: Sequence[str]) -> None:
        """paths: without zero characters in them: ValueError."""
        names = "\0".join(paths)
        if names.count("\0") != max(0, len(paths) - 1):
            raise ValueError("a path with a zero character in it")
        found = library()
        assert found is not None, "without the library, read in Python"
        self._library = found
        self._files = (_File * len(paths))()
        self._held: list[object] = []
        self.raised: dict[int, Exception] = {}
        found.kvloom_files_open(self._files, len(paths), os.fsencode(names) + b"\0")

    def error(self, number: int) -> int:
        """The errno of file `number`, NOT_A_FILE, TOO_SHORT, or 0 if all went well so far."""
        return int(self._files[number].error)

    def size(self, number: int) -> int:
        """The length of a file that is open, in bytes."""
        return int(self._files[number].size)

    def place(self, number: int, into: memoryview, filled: tuple[int, int]) -> None:
        """Have the file read into this memory. Raises ValueError if it is too short.

        filled: a function and its state as `NativeSink.native_filled` gives them, told of each step.
        """
        file = self._files[number]
        if into.nbytes < file.size or into.readonly or not into.contiguous:
            raise ValueError(f"{into.nbytes} bytes of memory for a file of {file.size}")
        self._held.append(into)
        file.into = native.pointer(into)
        file.filled, file.state = filled

    def place_slowly(self, number: int, into: memoryview, filled: Callable[[int], object]) -> None:
        """`place` with a Python function. If it raises, it is not called again, and `raised` has the exception."""

        def call(_: object, num_bytes: int) -> int:
            try:
                filled(num_bytes)
            except Exception as error:
                self.raised[number] = error
                return 1
            return 0

        function = _FILLED(call)
        self._held.append(function)
        self.place(number, into, (ctypes.cast(function, ctypes.c_void_p).value or 0, 0))

    def read(self, mode: Mode) -> None:
        """Read every file that has a place, and close all. mode: whether past the page cache (O_DIRECT).

        `auto`: what the page cache does not hold, of files over 1 MiB. `sequential`: none, and the kernel is told to
        read ahead, also the next small files.
        """
        self._library.kvloom_files_read(self._files, len(self._files), _MODES[mode])
        self._held.clear()

    def close(self) -> None:
        """Close what `read` has not. Idempotent."""
        for file in self._files:
            file.into = None
        self._library.kvloom_files_read(self._files, len(self._files), 0)
