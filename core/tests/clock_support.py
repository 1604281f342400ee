"""Deadlines that nobody waits for: while a call hangs, the clock moves on as soon as every thread waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from unittest import mock
from weakref import WeakSet

from core_support import Gate

from kvloom.runtime import Condition, SystemRuntime

_STEP_SECONDS = 2.0
"""A deadline takes several: once every thread was thought to wait in error ends no call that goes on."""
_LOOK_SECONDS = 0.002
_JOIN_SECONDS = 0.02

_join = threading.Thread.join


def _nobody_could_run() -> bool:
    """Return whether every other thread waits. A thread that a busy machine keeps waiting, but that could run, does
    not."""
    mine = f"/proc/self/task/{threading.get_native_id()}/stat"
    for file in glob("/proc/self/task/*/stat"):
        with suppress(OSError):  # it ended
            if file != mine and Path(file).read_text().rpartition(")")[2].split()[0] in "RD":
                return False
    return True


class SkippingClock:
    """The clock of every runtime in this process, which can be moved ahead; who waits for a time is woken then."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self._conditions: WeakSet[threading.Condition] = WeakSet()

    def now(self) -> float:
        return time.monotonic() + self._ahead

    def condition(self, runtime: SystemRuntime) -> Condition:
        condition = threading.Condition(threading.Lock())
        self._conditions.add(condition)
        return condition

    def join(self, thread: threading.Thread, timeout: float | None = None) -> None:
        """Thread.join, which would wait for real seconds."""
        until = None if timeout is None else self.now() + timeout
        while thread.is_alive() and (until is None or self.now() < until):
            _join(thread, _JOIN_SECONDS)

    def skip(self, seconds: float) -> None:
        self._ahead += seconds
        for condition in tuple(self._conditions):
            with condition:
                condition.notify_all()

    def skip_while_all_wait(self, ended: threading.Event) -> None:
        before = -1.0
        while not ended.wait(_LOOK_SECONDS):
            others = time.process_time() - time.thread_time()  # who waits for the interpreter's lock seems to sleep
            if others - before < 1e-4 and _nobody_could_run():
                self.skip(_STEP_SECONDS)
            before = others


@contextmanager
def skipping_clock() -> Iterator[SkippingClock]:
    """Have runtimes, also those that are there already, ask a clock that can be moved. Before the engine is opened."""
    clock = SkippingClock()
    with (
        mock.patch.object(SystemRuntime, "now", staticmethod(clock.now)),
        mock.patch.object(SystemRuntime, "condition", lambda runtime: clock.condition(runtime)),
        mock.patch.object(threading.Thread, "join", lambda thread, timeout=None: clock.join(thread, timeout)),
    ):
        yield clock


class Hang(Gate):
    """A gate that takes no real time: a deadline that ends a call before it passes in a moment."""

    def __init__(self, clock: SkippingClock) -> None:
        super().__init__()
        self.clock = clock
        self._skipping: threading.Thread | None = None
        self._lock = threading.Lock()

    def __call__(self, verb: str, key: str) -> None:
        with self._lock:
            if self._skipping is None:
                self._skipping = threading.Thread(target=self.clock.skip_while_all_wait, args=(self._event,))
                self._skipping.start()
        super().__call__(verb, key)

    def open(self) -> None:
        super().open()
        if self._skipping is not None:
            self._skipping.join()
