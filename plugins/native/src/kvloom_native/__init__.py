"""Native code that several packages of kvloom use. The core finds the library itself: see `kvloom.native.load`."""

from kvloom_native.files import NOT_A_FILE, TOO_SHORT, Files, library
from kvloom_native.mapping import MappedFile, are_current, is_memory
from kvloom_native.resp import (
    A_LINE,
    CLOSED,
    ENDLESS,
    NOT_TAKEN,
    TOO_SLOW,
    WRONG_END,
    Resp,
    RespBlob,
    RespConnection,
    resp_functions,
)

__all__ = [
    "A_LINE",
    "CLOSED",
    "ENDLESS",
    "NOT_A_FILE",
    "NOT_TAKEN",
    "TOO_SHORT",
    "TOO_SLOW",
    "WRONG_END",
    "Files",
    "MappedFile",
    "Resp",
    "RespBlob",
    "RespConnection",
    "are_current",
    "is_memory",
    "library",
    "resp_functions",
]
