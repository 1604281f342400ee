"""Native code that several packages of kvloom use. The core finds the library itself: see `kvloom.native.load`."""

from __future__ import annotations

import ctypes
from functools import cache

from kvloom import native
from kvloom.errors import PluginError


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it was not built or is not of this version."""
    try:
        found = native.load("kvloom_native", "kvloom")
    except PluginError:
        return None
    if found.kvloom_version() != native.VERSION:
        return None
    found.kvloom_files_open.restype = found.kvloom_files_read.restype = None
    return found
