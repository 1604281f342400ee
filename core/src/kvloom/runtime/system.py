"""Clock, randomness, locks, waiting and threads: the only module of the core that asks the system for them.

Everything that waits, times or runs in the background receives a `Runtime`. A simulation that implements it with a
seeded schedule can replay a run.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TypeVar
from weakref import WeakSet

from kvloom import interrupts, numa

T = TypeVar("T")


class Lock(Protocol):
    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Condition(Lock, Protocol):
    def wait(self, timeout: float | None = None) -> bool: ...
    def notify_all(self) -> None: ...


class Thread(Protocol):
    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Runtime(Protocol):
    """The core's interface to the system it runs on."""

    def now(self) -> float:
        """Monotonic seconds."""

    def wall(self) -> float:
        """Seconds since the epoch."""

    def sleep(self, seconds: float) -> None: ...

    def random(self) -> float:
        """In [0, 1)."""

    def lock(self) -> Lock: ...
    def condition(self) -> Condition: ...

    def spawn(self, run: Callable[[], None], *, name: str, low_priority: bool = False) -> Thread:
        """Run in a daemon thread: a call that never returns must not keep the process alive."""

    def run_on(self, cpus: frozenset[int]) -> None:
        """Have its threads, and those it spawns from now on, run on these processors, as far as they may."""

    def at_exit(self, close: Callable[[], None]) -> Callable[[], None]:
        """Call `close` when this process ends; the returned function cancels that.

        A daemon thread inside torch at that time would end the process with SIGABRT.
        """

    def uninterrupted(
        self, function: Callable[[], T], *, cancel: Callable[[], None] | None = None,
        discard: Callable[[T], object] | None = None, leave: bool = False,
    ) -> T:  # fmt: skip
        """Return `function`'s result, or raise its error. It runs where no signal handler runs.

        If a signal handler raises in the caller, the error is raised once `cancel` has returned or, without `cancel`,
        once `function` has. leave: at once. discard: called with a result that comes later.
        """


class SystemRuntime:
    """The clock, locks and threads of the operating system."""

    def __init__(self) -> None:
        self._random = random.Random()
        self._threads: WeakSet[threading.Thread] = WeakSet()
        self._cpus: frozenset[int] = frozenset()

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
    sleep = staticmethod(time.sleep)
    uninterrupted = staticmethod(interrupts.uninterrupted)

    def random(self) -> float:
        return self._random.random()

    lock = staticmethod(threading.Lock)

    def condition(self) -> Condition:
        return threading.Condition(threading.Lock())

    def spawn(self, run: Callable[[], None], *, name: str, low_priority: bool = False) -> Thread:
        def run_nicely() -> None:
            if low_priority and sys.platform == "linux":  # elsewhere it would be the whole process's priority
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            numa.run_on(self._cpus)
            run()

        thread = threading.Thread(target=run_nicely, name=name, daemon=True)
        self._threads.add(thread)
        thread.start()
        return thread

    def run_on(self, cpus: frozenset[int]) -> None:
        self._cpus = cpus
        for thread in list(self._threads):
            if thread.native_id is not None and thread.is_alive():
                numa.run_on(cpus, thread.native_id)

    def at_exit(self, close: Callable[[], None]) -> Callable[[], None]:
        pid = os.getpid()

        def close_here() -> None:
            if os.getpid() == pid:
                close()

        atexit.register(close_here)
        return lambda: atexit.unregister(close_here)


def close_all(*closes: Callable[[], object]) -> None:
    """Call all of them in this order, also after one that raised. Raises what the last of those raised."""
    with contextlib.ExitStack() as stack:
        for close in reversed(closes):
            stack.callback(close)
