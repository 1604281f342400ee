"""Looking again and again."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..sources import Source
from .screen import screen

if TYPE_CHECKING:
    from rich.console import Console

_QUITS = frozenset(b"qQ\x04")
_HINT = "q quits"


def watch(source: Source, told: dict[str, Any], console: Console, *, every: float) -> None:
    """Run until q or Ctrl-C. If an engine ends, wait for it to come back. told: the first snapshot."""
    from rich.live import Live

    hint = _HINT if _keyboard() is not None else ""
    shown = screen(told, note=hint)
    with keys() as keyboard, Live(shown, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        live.refresh()
        while not quits(keyboard, every):
            before, note = told, hint
            try:
                told = source.read(False)
                shown = screen(told, before, note=note)
            except (OSError, ValueError) as error:
                told = before
                shown = screen(told, note=f"gone: {error}; this is what it said last, and it is asked again")
            live.update(shown, refresh=True)


def frame(told: dict[str, Any], console: Console) -> None:
    """Once."""
    console.print(screen(told))


def _keyboard() -> int | None:
    """The terminal that keys come from; None where there is none, or it is another job's."""
    try:
        found = sys.stdin.fileno()
        return found if os.isatty(found) and os.tcgetpgrp(found) == os.getpgrp() else None
    except (OSError, ValueError, AttributeError):
        return None


@contextlib.contextmanager
def keys() -> Iterator[int | None]:
    """A terminal that returns each key as it is pressed, without echo; restored afterwards."""
    import termios
    import tty

    terminal = _keyboard()
    if terminal is None:
        yield None
        return
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield terminal
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def quits(keyboard: int | None, seconds: float) -> bool:
    """Return whether a key that ends it is pressed in the given time."""
    if keyboard is None:
        time.sleep(seconds)
        return False
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([keyboard], [], [], left)[0]:
            pressed = os.read(keyboard, 64)
            if not pressed or _QUITS & set(pressed):
                return True
    return False
