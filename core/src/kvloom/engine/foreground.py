"""The verbs that callers wait for: an engine that is closed lets them end before its parts are closed under them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvloom.pipeline.task import Cancellation
from kvloom.runtime import Runtime

T = TypeVar("T")


class Foreground:
    """The verbs under way of one engine. A verb takes no lock here unless the engine is being closed."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._changed = runtime.condition()
        self._under_way: set[Cancellation] = set()
        self._closing = False

    def run(self, stop: Cancellation, verb: Callable[[], T]) -> T:
        """Return the verb's result. stop: its own. The verb checks that the engine is open once it is noted here."""
        self._under_way.add(stop)
        try:
            return verb()
        finally:
            self._under_way.discard(stop)
            if self._closing:
                with self._changed:
                    self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """Wait until all verbs are over, up to `seconds`; later ones end at their next copy. No new one may begin."""
        until = self._runtime.now() + seconds
        self._closing = True
        with self._changed:
            while self._under_way and (left := until - self._runtime.now()) > 0:
                self._changed.wait(left)
        for stop in tuple(self._under_way):
            stop.stop()
