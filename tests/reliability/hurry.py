"""A runtime whose time goes a hundred times as fast, so that nobody waits for back-offs and rounds of upkeep."""

from __future__ import annotations

import time
from typing import Any

from kvloom.runtime import Condition, SystemRuntime

_FACTOR = 100.0


class _Hurried:
    """A condition whose timeouts are in seconds of fast time."""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition

    def __enter__(self) -> bool:
        return self._condition.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._condition.__exit__(*raised)

    def wait(self, timeout: float | None = None) -> bool:
        return self._condition.wait(None if timeout is None else timeout / _FACTOR)

    def notify_all(self) -> None:
        self._condition.notify_all()


class HurriedRuntime(SystemRuntime):
    """Deadlines on it must be generous a hundred times over: `1h` is 36 seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._began = time.time()

    def now(self) -> float:  # type: ignore[override]
        return time.monotonic() * _FACTOR

    def wall(self) -> float:  # type: ignore[override]
        return self._began + (time.time() - self._began) * _FACTOR

    def sleep(self, seconds: float) -> None:  # type: ignore[override]
        time.sleep(seconds / _FACTOR)

    def condition(self) -> Condition:
        return _Hurried(super().condition())
