"""A limit on how long a component may keep a test waiting."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 120.0
"""Time after which a test counts as hanging; `--kvloom-seconds` and `kvloom check --seconds` set it."""
SAYS = "still not done after"
"""The error text for a test that hangs."""


@contextmanager
def in_time(seconds: float, hang: Callable[[], None]) -> Iterator[None]:
    """Call `hang`, which is to raise, where the main thread stands after some seconds. Other threads have no limit."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        hang()

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
