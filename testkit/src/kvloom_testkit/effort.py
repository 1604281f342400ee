"""The kit's effort to find faults that show only now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator

_TIMES, _PART = 5, 4
thorough = False
"""`--kvloom-thorough`, and `kvloom check --thorough`."""
brief = False
"""Fewer rounds, for components that are known to be right: the kit's own tests."""


def rounds(usual: int) -> int:
    """The number of attempts for a test that usually makes `usual`, scaled by the effort that was asked for."""
    return usual * _TIMES if thorough else usual // _PART if brief else usual


_SECONDS = 5.0


def turns(usual: int) -> Iterator[int]:
    """Numbers of `rounds(usual)`, but no more of a slow store after some seconds than a part of it."""
    until = time.monotonic() + _SECONDS
    for number in range(rounds(usual)):
        if not thorough and number >= usual // _PART and time.monotonic() > until:
            return
        yield number
