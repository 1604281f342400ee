"""How much the kit does to meet a fault that shows only now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator

_TIMES, _PART = 5, 4
thorough = False
"""`--kvloom-thorough`, and `kvloom check --thorough`."""
brief = False
"""For what is known to be right: the kit's own tests."""


def rounds(usual: int) -> int:
    """How often something is tried that is tried `usual` times, if nobody has asked for more or less."""
    return usual * _TIMES if thorough else usual // _PART if brief else usual


_SECONDS = 5.0


def turns(usual: int) -> Iterator[int]:
    """Numbers of `rounds(usual)`, but no more of a slow store after some seconds than a part of it."""
    until = time.monotonic() + _SECONDS
    for number in range(rounds(usual)):
        if not thorough and number >= usual // _PART and time.monotonic() > until:
            return
        yield number
