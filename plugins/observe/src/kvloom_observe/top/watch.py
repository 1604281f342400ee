"""Looking again and again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..sources import Source
from .screen import screen

if TYPE_CHECKING:
    from rich.console import Console


def watch(source: Source, told: dict[str, Any], console: Console, *, every: float) -> None:
    """Until Ctrl-C. An engine that goes away is waited for. told: what it says now."""
    from rich.live import Live

    before = None
    with Live(screen(told), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            live.update(screen(told, before, note=""), refresh=True)
            time.sleep(every)
            before, note = told, ""
            try:
                told = source.read(False)
            except (OSError, ValueError) as error:
                note = f"gone: {error}; this is what it said last, and it is asked again"
                live.update(screen(told, None, note=note), refresh=True)
                time.sleep(every)


def frame(told: dict[str, Any], console: Console) -> None:
    """Once."""
    console.print(screen(told))
