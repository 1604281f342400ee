"""Reads many files by two calls of native code, and maps files that are memory, where `kvloom-native` is installed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NamedTuple, cast

from kvloom import BackendError, MappedBlob, ReadDone, Sink, native
from kvloom_backend_disk.transfer import Transfer

_INSTALLED = find_spec("kvloom_native") is not None
if _INSTALLED:
    import kvloom_native
    from kvloom_native import NOT_A_FILE, TOO_SHORT, Files, MappedFile, is_memory, library, map_files

_AT_ONCE = 32
"""Files that are open at once."""
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)

Failure = Callable[[str, OSError], "Exception | bool"]
"""Returns what an error about a file comes to, given its path: an outcome of `get_into`."""


def available() -> bool:
    """Return whether there is native code to read with."""
    return _INSTALLED and library() is not None


def are_memory(directory: str) -> bool:
    """Return whether files in a directory can be mapped, and lie in memory: no read of them ever waits for a disk."""
    return _INSTALLED and is_memory(directory)


def mapped(files: Sequence[tuple[str, int]]) -> list[MappedBlob | None]:
    """Files as memory, given their paths and the most bytes of each; None if there is none, or it cannot be mapped."""
    return [None if isinstance(one, OSError) else one for one in map_files(files)]


def are_current(files: Sequence[MappedBlob]) -> list[bool]:
    """Return whether each of these is still at its path as it was mapped."""
    if not _INSTALLED:  # nothing was mapped
        return [one.current() for one in files]
    return kvloom_native.are_current(cast("Sequence[MappedFile]", files))


class _Read(NamedTuple):
    number: int
    """Position in the request."""
    sink: Sink
    path: str


def read_many(
    requests: Sequence[tuple[str, Sink]], path: Callable[[str], str], transfer: Transfer, failure: Failure,
    done: ReadDone,
) -> None:  # fmt: skip
    """As `get_many_into`. path: returns the file of a key."""
    left: list[_Read] = []
    for number, (key, sink) in enumerate(requests):
        try:
            left.append(_Read(number, sink, path(key)))
        except ValueError as error:
            done(number, error)
    at_once = _AT_ONCE
    while left:
        some, left = left[:at_once], left[at_once:]
        unopened = _read_some(some, transfer, failure, done)
        if unopened:
            at_once, left = len(some) - len(unopened), unopened + left


def _read_some(reads: Sequence[_Read], transfer: Transfer, failure: Failure, done: ReadDone) -> list[_Read]:
    """Return those for which there was no descriptor, if there was one for others, which are closed again."""
    files = Files([read.path for read in reads])
    short = [at for at in range(len(reads)) if files.error(at) in _NO_DESCRIPTOR]
    unopened = short if len(short) < len(reads) else []
    refused: dict[int, Exception] = {}
    natively: set[int] = set()
    """Those whose sinks have native functions, which are still to be told of the end in Python."""
    try:
        for at, read in enumerate(reads):
            if not files.error(at):
                try:
                    if _place(files, at, read.sink):
                        natively.add(at)
                except Exception as error:
                    refused[at] = error
        files.read(transfer.mode if transfer.window is None else "sequential")
    finally:
        files.close()
    for at, read in enumerate(reads):
        outcome: Exception | bool = True
        if at in unopened:
            continue
        if at in refused:
            outcome = refused[at]
        elif files.error(at):
            outcome = _failed(files, at, read.path, failure)
        elif at in files.raised:
            outcome = files.raised[at]
        elif at in natively:
            try:
                read.sink.filled(files.size(at))
            except Exception as error:
                outcome = error
        done(read.number, outcome)
    transfer.were_read((read.path, files.size(at)) for at, read in enumerate(reads) if not files.error(at))
    return [reads[at] for at in unopened]


def _place(files: Files, at: int, sink: Sink) -> bool:
    """Return whether the sink has a native function."""
    size = files.size(at)
    into = sink.reserve(size)[:size]
    native_filled = native.filled_by(sink) if size else None
    if native_filled is not None:
        files.place(at, into, native_filled)
    elif size:
        files.place_slowly(at, into, sink.filled)
    return native_filled is not None


def _failed(files: Files, at: int, path: str, failure: Failure) -> Exception | bool:
    code = files.error(at)
    if code == TOO_SHORT:
        return BackendError(f"the file ends after fewer than its {files.size(at)} bytes")
    if code == NOT_A_FILE:
        return failure(path, OSError(0, "not a regular file"))
    return failure(path, OSError(code, os.strerror(code), path))
