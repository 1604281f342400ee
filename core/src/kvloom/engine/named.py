"""Engines by name, for `Engine.get_or_create`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvloom.engine.lookup import Index
from kvloom.forks import notify_after_fork
from kvloom.runtime import SystemRuntime

E = TypeVar("E", bound=Index)


class NamedEngines(Generic[E]):
    """The named engines of this process. Those of a parent process count as closed."""

    def __init__(self) -> None:
        self._engines: dict[str, E] = {}
        self._lock = SystemRuntime().lock()
        notify_after_fork(self)

    def after_fork_in_child(self, pid: int) -> None:
        self._lock = SystemRuntime().lock()

    def get(self, name: str) -> E | None:
        """The open engine of that name, if there is one."""
        engine = self._engines.get(name)
        return None if engine is None or engine._closed else engine

    def get_or_open(self, name: str, open: Callable[[], E]) -> E:
        with self._lock:
            engine = self.get(name)
            if engine is None:
                engine = self._engines[name] = open()
            return engine

    def close(self, name: str) -> None:
        """Close and forget the engine of that name, if there is one."""
        with self._lock:
            engine = self._engines.pop(name, None)
        if engine is not None:
            engine.close()
