"""The `Runtime` of a simulated process, over the scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import TracebackType
from typing import Any

import greenlet

from simulation.fibers import EPOCH, FOREVER, Fiber, Process, Scheduler, Violation


class SimLock:
    """`threading.Lock`: whoever comes first when it is free gets it, waiting or not."""

    __slots__ = ("_owner", "_scheduler", "_waiters")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Fiber | None = None
        self._waiters: list[Fiber] = []

    def __enter__(self) -> bool:
        scheduler = self._scheduler
        if scheduler.tick():
            scheduler.interrupted()
        if self._owner is not None:
            self._wait()
        self._owner = scheduler.current
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner = None
        if self._waiters:
            self._pass_on()
        if self._scheduler.tick():
            self._scheduler.interrupted()

    def _wait(self) -> None:
        scheduler = self._scheduler
        me = scheduler.current
        if self._owner is me and not scheduler.ending:
            scheduler.stop(Violation("deadlock", f"{me.name} takes a lock that it holds"))
        while self._owner is not None and not scheduler.ending:
            self._waiters.append(me)
            scheduler.park(FOREVER, "a lock")

    def _pass_on(self) -> None:
        waiters = self._waiters
        index = int(self._scheduler.rng.random() * len(waiters))
        waiters[index], waiters[-1] = waiters[-1], waiters[index]
        self._scheduler.wake(waiters.pop())


class SimCondition(SimLock):
    """`threading.Condition` over a lock of its own."""

    __slots__ = ("_sleepers",)

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._sleepers: list[Fiber] = []

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        me = scheduler.current
        if scheduler.ending:
            raise greenlet.GreenletExit
        if self._owner is not me:
            raise RuntimeError("cannot wait on un-acquired lock")
        if timeout is not None and timeout > 9_000_000_000:
            raise OverflowError("timeout value is too large")  # as threading says
        self._sleepers.append(me)
        self._owner = None
        if self._waiters:
            self._pass_on()
        until = FOREVER if timeout is None else scheduler.time + max(0.0, timeout)
        notified = scheduler.park(until, "a condition")
        if not notified and me in self._sleepers:
            self._sleepers.remove(me)
        if self._owner is not None:
            self._wait()
        self._owner = me
        return notified

    def notify_all(self) -> None:
        if self._owner is not self._scheduler.current and not self._scheduler.ending:
            raise RuntimeError("cannot notify on un-acquired lock")
        sleepers, self._sleepers = self._sleepers, []
        for fiber in sleepers:
            self._scheduler.wake(fiber)


class SimRuntime:
    """`kvloom.runtime.Runtime` for one process of a simulation."""

    def __init__(self, scheduler: Scheduler, process: Process, rng: random.Random) -> None:
        self.scheduler = scheduler
        self.process = process
        self._rng = rng

    def now(self) -> float:
        scheduler = self.scheduler
        if scheduler.tick():
            scheduler.interrupted()
        return scheduler.time

    def wall(self) -> float:
        return EPOCH + self.scheduler.time

    def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        self.scheduler.park(self.scheduler.time + seconds, "time to pass")

    def random(self) -> float:
        return self._rng.random()

    def lock(self) -> SimLock:
        return SimLock(self.scheduler)

    def condition(self) -> SimCondition:
        return SimCondition(self.scheduler)

    def spawn(self, run: Callable[[], None], *, name: str, low_priority: bool = False) -> Any:
        fiber = self.scheduler.spawn(self.process, run, name)
        self.scheduler.point()
        return fiber

    def run_on(self, cpus: frozenset[int]) -> None:
        pass

    def at_exit(self, close: Callable[[], None]) -> Callable[[], None]:
        return lambda: None  # a simulated process is killed, or closes what it has opened

    def uninterrupted(self, function: Callable[[], Any], **_: Any) -> Any:
        return function()
