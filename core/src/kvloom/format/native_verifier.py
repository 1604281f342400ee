"""Verifies blobs in native code, where the package `kvloom-native` is installed: what it finds right is right."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

from kvloom import native

_RIGHT = 1


class NativeVerifier:
    """Checks an unsigned blob while it arrives: everything in it but what its description says.

    `csrc/verify.h` of the package has the details. What is not right has to be looked at by `envelope.Verifier`.
    """

    __slots__ = ("_data", "_function", "_state")

    def __init__(self, library: Library, data: memoryview, max_buffers: int) -> None:
        self._data = data  # held as long as an address of it
        self._state = (ctypes.c_uint32 * library.words)()
        self._function = library.filled_address
        library.begin(self._state, native.pointer(data), len(data), max_buffers)

    @property
    def filled(self) -> tuple[int, int]:
        """The function and state that `NativeSink.native_filled` describes."""
        return self._function, ctypes.addressof(self._state)

    @property
    def right(self) -> bool:
        """All of it has arrived, and is right."""
        return bool(self._state[0] == _RIGHT)


class Library:
    """The functions of the library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.kvloom_verifier_bytes.restype = ctypes.c_uint64
        self.words = -(-library.kvloom_verifier_bytes() // 4)
        self.begin = library.kvloom_verifier_begin
        self.begin.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32)
        self.begin.restype = None
        self.filled_address = ctypes.cast(library.kvloom_verifier_filled, ctypes.c_void_p).value or 0


@cache
def library() -> Library | None:
    """The library, or None if there is none that can be used."""
    found = native.own_library(brief=True)
    return None if found is None else Library(found)


def right(blobs: Sequence[memoryview], max_buffers: int) -> list[bool]:
    """Return for each whole blob whether native code finds it right; False where there is none."""
    verify = _verify()
    if verify is None:
        return [False] * len(blobs)
    addresses = (ctypes.c_void_p * len(blobs))(*map(native.pointer, blobs))
    sizes = (ctypes.c_uint64 * len(blobs))(*map(len, blobs))
    answers = ctypes.create_string_buffer(len(blobs))
    verify(addresses, sizes, len(blobs), max_buffers, answers)
    return [*map(bool, answers.raw)]


@cache
def _verify() -> Callable[..., int] | None:
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    return native.own_function("kvloom_verify", pointer, pointer, number, number, pointer)
