"""Addresses of buffers, and joining adjacent ones: O_DIRECT depends on both."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple


class Extent(NamedTuple):
    """A run of bytes. Valid only as long as the buffers it was made of."""

    address: int
    view: memoryview


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_acquire = ctypes.pythonapi.PyObject_GetBuffer
_acquire.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_PyBuffer),)
_release.restype = None


def address(view: memoryview) -> int:
    """The address of the first byte; unlike `ctypes.c_char.from_buffer` it serves read-only memory too."""
    buffer = _PyBuffer()
    _acquire(view, buffer, 0)
    _release(buffer)
    return buffer.buf or 0


def coalesce(views: Sequence[memoryview]) -> list[Extent]:
    """The same bytes in the same order in as few runs as possible: views that touch in memory become one."""
    runs: list[Extent] = []
    for view in views:
        start = address(view)
        if runs and runs[-1].address + len(runs[-1].view) == start:
            first, size = runs[-1].address, len(runs[-1].view) + len(view)
            runs[-1] = Extent(first, memoryview((ctypes.c_char * size).from_address(first)).cast("B"))
        else:
            runs.append(Extent(start, view))
    return runs
