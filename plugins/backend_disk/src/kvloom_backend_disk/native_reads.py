"""Reads many files by two calls of native code, where the package `kvloom-native` is installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from kvloom import BackendError, ReadDone, Sink, native
from kvloom_backend_disk.transfer import Mode

_INSTALLED = find_spec("kvloom_native") is not None
if _INSTALLED:
    from kvloom_native import NOT_A_FILE, TOO_SHORT, Files, library

_AT_ONCE = 32
"""Files that are open at once."""


def available() -> bool:
    """Return whether there is native code to read with."""
    return _INSTALLED and library() is not None


def read_many(
    requests: Sequence[tuple[str, Sink]], path: Callable[[str], str], mode: Mode,
    failure: Callable[[str, OSError], Exception | bool], done: ReadDone,
) -> None:  # fmt: skip
    """As `get_many_into`. path: the file of a key. failure: what an error about a file comes to, given its path."""
    for start in range(0, len(requests), _AT_ONCE):
        _read_some(range(start, min(start + _AT_ONCE, len(requests))), requests, path, mode, failure, done)


def _read_some(
    numbers: range, requests: Sequence[tuple[str, Sink]], path: Callable[[str], str], mode: Mode,
    failure: Callable[[str, OSError], Exception | bool], done: ReadDone,
) -> None:  # fmt: skip
    paths: list[tuple[int, str]] = []
    for number in numbers:
        try:
            paths.append((number, path(requests[number][0])))
        except ValueError as error:
            done(number, error)
    files = Files([place for _, place in paths])
    refused: dict[int, Exception] = {}
    natively: set[int] = set()
    """Those whose sinks have native functions, which are still to be told of the end in Python."""
    try:
        for at, (number, _) in enumerate(paths):
            if not files.error(at):
                try:
                    if _place(files, at, requests[number][1]):
                        natively.add(at)
                except Exception as error:
                    refused[at] = error
        files.read(mode)
    finally:
        files.close()
    for at, (number, place) in enumerate(paths):
        outcome: Exception | bool = True
        if at in refused:
            outcome = refused[at]
        elif files.error(at):
            outcome = _failed(files, at, place, failure)
        elif at in files.raised:
            outcome = files.raised[at]
        elif at in natively:
            try:
                requests[number][1].filled(files.size(at))
            except Exception as error:
                outcome = error
        done(number, outcome)


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


def _failed(files: Files, at: int, place: str, failure: Callable[[str, OSError], Exception | bool]) -> Exception | bool:
    code = files.error(at)
    if code == TOO_SHORT:
        return BackendError(f"the file ends after fewer than its {files.size(at)} bytes")
    if code == NOT_A_FILE:
        return failure(place, OSError(0, "not a regular file"))
    return failure(place, OSError(code, os.strerror(code), place))
