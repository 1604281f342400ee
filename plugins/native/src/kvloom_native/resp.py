"""Requests and replies (RESP) over a blocking socket, by calls that do not hold the interpreter's lock."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from kvloom import native
from kvloom_native.files import library

A_LINE = -5000
"""The reply is a line in the buffer."""
CLOSED = -5001
"""The other end of the connection hung up."""
WRONG_END = -5002
"""A blob is not followed by the end of a reply."""
TOO_SLOW = -5003
"""More waiting than `timeout` and the bytes moved allow."""
NOT_TAKEN = -5004
"""The other end has taken nothing for the socket's timeout (SO_SNDTIMEO); -EAGAIN is that it has sent nothing."""
ENDLESS = -5005
"""More than 8 KiB of a line, and no end of it."""


class Connection(ctypes.Structure):
    """A blocking socket, a buffer and an account of time, for the functions of `resp`."""

    _fields_ = (
        ("_fd", ctypes.c_int32),
        ("start", ctypes.c_uint32),
        ("end", ctypes.c_uint32),
        ("_capacity", ctypes.c_uint32),
        ("_buffer", ctypes.c_void_p),
        ("_parts", ctypes.c_void_p),
        ("_part_count", ctypes.c_uint64),
        ("moved", ctypes.c_uint64),
        ("waited", ctypes.c_double),
        ("timeout", ctypes.c_double),
        ("_slowest", ctypes.c_double),
        ("_request", ctypes.c_size_t * 2),
    )
    start: int
    """`buffer[start:end]` has arrived and was not taken yet."""
    end: int
    moved: int
    """Bytes, in both directions. May be set, as the two below."""
    waited: float
    """Seconds in calls to the system."""
    timeout: float
    """Seconds that these may take, in addition to what `moved` takes at the slowest rate."""

    def __init__(self, fd: int, buffer: bytearray, *, slowest: float) -> None:
        """buffer: of 16 KiB or so; not to be resized. slowest: bytes a second."""
        super().__init__(_fd=fd, _capacity=len(buffer), _buffer=native.pointer(buffer), _slowest=slowest)
        self._buffer_held = buffer

    def place(self, parts: Sequence[bytes | memoryview]) -> object:
        """Have `next` send these. Returns what has to be held until then. parts: contiguous, not to be changed."""
        places = (ctypes.c_size_t * (2 * len(parts)))()
        for at, part in enumerate(parts):
            places[2 * at], places[2 * at + 1] = native.pointer(part), len(part)
        self._parts, self._part_count = ctypes.addressof(places), len(parts)
        return places, parts


class Blob(ctypes.Structure):
    """Memory for a blob, contiguous and writable, which the caller has checked; and how much of it has arrived."""

    _fields_ = (
        ("into", ctypes.c_void_p),
        ("done", ctypes.c_uint64),
        ("until", ctypes.c_uint64),
        ("filled", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
    )


class Functions(NamedTuple):
    """Functions of the library. Negative results are constants of this module, or an errno negated.

    After -EINTR, call again, without a request: it goes on. By then Python has had the signal.
    """

    next: Any
    """(connection, request or None, its bytes, ahead): send the request, or what was placed; then wait for a line. The
    size of the blob that it announces, or A_LINE. ahead: receive at most so many bytes at once, because more may belong
    elsewhere."""
    fill: Any
    """(connection, blob, ends, ahead): receive a blob to byte `until`, and what ends its reply if `ends`. The number of
    bytes that are in the buffer then. ahead: of what is behind the end, take up to so many bytes that have arrived."""
    is_silent: Any
    """(file descriptor): whether nothing has arrived, not even the end of the connection."""


@cache
def functions() -> Functions | None:
    """The functions, or None if there is no library that can be used."""
    slow, brief = library(), native.own_library(brief=True)
    if slow is None or brief is None:
        return None
    take, fill = slow.kvloom_resp_next, slow.kvloom_resp_fill
    take.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint32)
    fill.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32)
    take.restype = fill.restype = ctypes.c_int64
    return Functions(take, fill, brief.kvloom_resp_is_silent)
