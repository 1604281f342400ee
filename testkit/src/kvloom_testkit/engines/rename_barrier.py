"""A barrier at which processes that write to one store wait for each other, so that the kit finds their races."""

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
_MAX_MISSED = 8
"""Renames that waited in vain, after which a process waits no more: the other one does something else."""


def rename_together(engines: Iterable[Engine], store: Path) -> None:
    """Have engines, whose drivers are `RenamesTogether`, rename files of a store at the same moment from now on."""
    for engine in engines:
        engine.call("rename_together", store=str(store))


class RenamesTogether:
    """The call of an engine's driver that `rename_together` makes."""

    def rename_together(self, store: str) -> None:
        """From now on, each rename to a file of the store waits until another process is about to rename one, too.

        It waits for processes that were asked the same, at most 0.25 s. Renames by native code do not wait.
        """
        sys.addaudithook(RenameBarrier(store).on_audit)


class RenameBarrier:
    """Counts this process's renames in a file beside the store, and compares them with those of others."""

    def __init__(self, store: str) -> None:
        self._prefix = os.path.join(store, "")
        self._folder = Path(f"{store}.renames")
        self._folder.mkdir(exist_ok=True)
        self._name = str(os.getpid())
        self._lock = threading.Lock()
        self._count = self._missed = 0

    def on_audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Wait if the event is a rename to a file of the store."""
        if event == "os.rename" and self._missed < _MAX_MISSED and os.fsdecode(args[1]).startswith(self._prefix):
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
