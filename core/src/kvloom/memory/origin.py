"""The place in the code that took a piece of memory, for the message about one that was never given back."""

from __future__ import annotations

import sys
from types import CodeType

Origin = tuple[tuple[CodeType, int], ...]
"""Code and the offset of the instruction in it, the innermost first. Holds no frame, so nobody's local variables."""


def caller() -> Origin:
    """The four frames that called the function that calls this; fewer where there are fewer."""
    # Written out, because it runs for each lease: a loop takes twice as long.
    a = sys._getframe(1).f_back
    b = a.f_back if a is not None else None
    c = b.f_back if b is not None else None
    d = c.f_back if c is not None else None
    if a is None or b is None or c is None or d is None:
        return tuple((frame.f_code, frame.f_lasti) for frame in (a, b, c) if frame is not None)
    return (a.f_code, a.f_lasti), (b.f_code, b.f_lasti), (c.f_code, c.f_lasti), (d.f_code, d.f_lasti)


def in_words(origin: Origin) -> str:
    """`file:line in function`, the innermost first."""
    places = [f"{code.co_filename}:{_line(code, at)} in {code.co_name}" for code, at in origin]
    return ", called from ".join(places) or "an unknown place"


def _line(code: CodeType, offset: int) -> int | None:
    return next((line for start, end, line in code.co_lines() if start <= offset < end), code.co_firstlineno)
