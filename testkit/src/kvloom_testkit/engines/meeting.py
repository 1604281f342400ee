"""Lets processes that write to one store do so at the same moment, so that finding their races is no matter of luck."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvloom_testkit.engines.process import Engine

_WAIT_SECONDS = 0.25
_MOST_MISSED = 8
"""Renames that waited in vain, after which a process waits no more: the other one does something else."""


def let_meet(engines: Iterable[Engine], store: Path) -> None:
    """Have each of some engines call `meet` with a store."""
    for engine in engines:
        engine.call("meet", store=str(store))


def meet(store: str) -> None:
    """From now on, each rename to a file of a store waits until another process is about to rename one, too.

    It waits for processes that called this with the same store, and not for long. Renames by native code do not wait.
    """
    sys.addaudithook(Meeting(store).hear)


class Meeting:
    """Counts this process's renames in a file beside the store, and compares them with those of others."""

    def __init__(self, store: str) -> None:
        self._files = os.path.join(store, "")
        self._folder = Path(f"{store}.meeting")
        self._folder.mkdir(exist_ok=True)
        self._name = str(os.getpid())
        self._lock = threading.Lock()
        self._count = self._missed = 0

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        """Wait if the event is a rename to a file of the store."""
        if event == "os.rename" and self._missed < _MOST_MISSED and os.fsdecode(args[1]).startswith(self._files):
            self._wait()

    def _wait(self) -> None:
        with self._lock:
            self._count += 1
            count = self._count
            with (self._folder / self._name).open("ab") as file:
                file.write(b".")
        until = time.monotonic() + _WAIT_SECONDS
        while not any(one.stat().st_size >= count for one in self._folder.iterdir() if one.name != self._name):
            if time.monotonic() > until:
                self._missed += 1
                return
            time.sleep(0.001)
