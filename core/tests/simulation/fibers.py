"""Virtual time and a seeded scheduler: one seed replays one run.

A "thread" is a greenlet, so exactly one runs at a time and the scheduler alone says which. It may change its mind
whenever a lock is taken or given back, a condition is waited for or notified, the clock is read, a thread is spawned,
or somebody sleeps. Time passes by a microsecond with each change, and jumps to the next timer when nobody can run.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import random
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import greenlet

EPOCH = 1_800_000_000.0
"""The wall clock at the beginning of a run."""
_STEP_SECONDS = 1e-6
_MASK = (1 << 61) - 1
FOREVER = float("inf")


class Violation(Exception):
    """A complaint of the oracle. `kind` is one of a few words, so that a test can ask for the right one."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        self.text = text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(eq=False)
class Process:
    """Everything that a crash takes away at once: the threads of one engine and of its clients."""

    name: str
    alive: bool = True


class Fiber:
    """One simulated thread; also what `Runtime.spawn` returns."""

    def __init__(self, scheduler: Scheduler, process: Process, name: str, number: int) -> None:
        self.scheduler = scheduler
        self.process = process
        self.name = name
        self.number = number
        self.greenlet: greenlet.greenlet
        self.done = False
        self.ticket = 0
        self.parked = False
        self.timed_out = False
        self.priority = 0.0
        self.waits_for = ""
        self.joiners: list[Fiber] = []

    def join(self, timeout: float | None = None) -> None:
        scheduler = self.scheduler
        until = FOREVER if timeout is None else scheduler.time + timeout
        while not self.done and scheduler.time < until:
            me = scheduler.current
            self.joiners.append(me)
            if not scheduler.park(until, f"the end of {self.name}"):
                self.joiners.remove(me)

    def is_alive(self) -> bool:
        return not self.done

    def stack(self) -> str:
        """Its present stack."""
        frame = self.greenlet.gr_frame
        return "" if frame is None else "".join(traceback.format_stack(frame)[-14:])


@dataclass(frozen=True)
class Temper:
    """The behaviour of a scheduler; drawn from the seed, because each finds other races."""

    between_preemptions: float
    """Average number of choice points between interruptions of the running thread."""
    by_priority: bool
    """The thread of highest priority runs, and now and then loses it; else whichever, with equal chances."""
    stall_seconds: float
    """Average time that an interrupted thread sometimes stays away."""
    anywhere: bool
    """Before any statement of the core is a point of choice, not only where it asks the runtime for something."""

    @staticmethod
    def draw(rng: random.Random) -> Temper:
        anywhere = rng.random() < 0.4
        between = (20.0, 60.0, 300.0) if anywhere else (3.0, 8.0, 30.0, 120.0)
        return Temper(rng.choice(between), rng.random() < 0.5, rng.choice((0.0, 2e-4, 2e-3)), anywhere)


class Scheduler:
    """Chooses the running thread, and keeps the time."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(f"{seed}/schedule")
        self.temper = Temper.draw(self.rng)
        self.time = 0.0
        self.steps = 0
        self.digest = 0
        """Changes with every choice made and everything noted: equal digests, equal runs."""
        self.violation: Violation | None = None
        self.on_alarm: Callable[[], None] = lambda: None
        self.alarm_at = FOREVER
        self.step_limit = 1 << 62
        self.current: Fiber
        self.ending = False
        self._fibers: list[Fiber] = []
        self._ready: list[Fiber] = []
        self._timers: list[tuple[float, int, Fiber, int]] = []
        self._numbers = itertools.count()
        self._lowest = 0.0
        self._atomic = False
        self._countdown = self._draw_countdown()
        self.tick = itertools.chain.from_iterable(self._ticks()).__next__
        """Called at every point of choice: whether the running thread is interrupted there."""

    # -- what the world does with it -----------------------------------------------------------------------------------

    def run(self, main: Callable[[], None]) -> None:
        """Run until `main` has returned. Raises Violation."""
        self._hub = greenlet.getcurrent()
        conductor = self.spawn(Process("world"), main, "conductor")
        while not conductor.done and self.violation is None:
            fiber = self._next()
            if fiber is None:
                break
            self.current = fiber
            fiber.greenlet.switch()
        if self.violation is None and not conductor.done:
            self.violation = Violation("deadlock", f"nobody can run, and nothing will change that\n{self.stacks()}")
        if self.violation is not None:
            raise self.violation

    def end(self) -> None:
        """Unwind every thread that is left. Nothing that they still do counts."""
        self.ending = True
        for fiber in self._fibers:
            for _ in range(100):
                if fiber.greenlet.dead or not fiber.greenlet:
                    break
                self.current = fiber
                try:
                    fiber.greenlet.throw(greenlet.GreenletExit)
                except BaseException:
                    continue
        self._fibers.clear()
        self._ready.clear()
        self._timers.clear()

    def kill(self, process: Process) -> None:
        """From now on none of its threads runs."""
        process.alive = False
        self._ready = [fiber for fiber in self._ready if fiber.process.alive]

    def note(self, number: int) -> None:
        """Have the digest cover `number`."""
        self.digest = (self.digest * 1_000_003 ^ number) & _MASK

    def stop(self, violation: Violation) -> None:
        """End the run. Does not return to whoever found out; what it was doing stays undone."""
        if self.ending:
            raise greenlet.GreenletExit
        if self.violation is None:
            self.violation = violation
        self._hub.switch()

    def collect_garbage(self) -> None:
        """The only time when it is collected: what `__del__` does then is part of the run."""
        self._atomic = True
        gc.collect()
        self._atomic = False

    def living(self, process: Process) -> list[Fiber]:
        """Its threads that have not returned."""
        return [fiber for fiber in self._fibers if fiber.process is process and not fiber.done]

    def stacks(self) -> str:
        """Stacks of all waiting threads."""
        waiting = [fiber for fiber in self._fibers if not fiber.done and fiber.process.alive]
        return "\n".join(
            f"-- {fiber.process.name} {fiber.name}: waits for {fiber.waits_for}\n{fiber.stack()}" for fiber in waiting
        )

    # -- what threads do -----------------------------------------------------------------------------------------------

    def spawn(self, process: Process, run: Callable[[], None], name: str) -> Fiber:
        fiber = Fiber(self, process, name, next(self._numbers))
        fiber.priority = self.rng.random()
        fiber.greenlet = greenlet.greenlet(lambda: self._main(fiber, run), parent=self._hub)
        self._fibers.append(fiber)
        if process.alive:
            self._ready.append(fiber)
        return fiber

    def point(self) -> None:
        """Somebody else may run now."""
        if self.tick():
            self.interrupted()

    def interrupted(self) -> None:
        """React to a `tick` that returned True."""
        self._countdown = 1
        if not self._atomic and not self.ending:
            self._countdown = self._draw_countdown()
            stall = self.temper.stall_seconds
            if stall and self.rng.random() < 0.05:
                self.park(self.time + self.rng.expovariate(1 / stall), "the processor")
            else:
                self._ready.append(self.current)
                self._switch()

    def park(self, until: float, waits_for: str) -> bool:
        """Wait for `wake` until `until`; whether it came."""
        if self.ending:
            raise greenlet.GreenletExit
        fiber = self.current
        if self._atomic:
            self.stop(Violation("deadlock", f"waits for {waits_for} inside of garbage collection"))
        fiber.ticket += 1
        fiber.parked = True
        fiber.timed_out = False
        fiber.waits_for = waits_for
        if until < FOREVER:
            heapq.heappush(self._timers, (until, next(self._numbers), fiber, fiber.ticket))
        self._switch()
        return not fiber.timed_out

    def wake(self, fiber: Fiber) -> None:
        if fiber.parked and fiber.process.alive:
            fiber.parked = False
            self._ready.append(fiber)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _main(self, fiber: Fiber, run: Callable[[], None]) -> None:
        try:
            run()
        except greenlet.GreenletExit:
            pass
        except BaseException as error:
            if self.ending:
                return
            text = "".join(traceback.format_exception(error))
            self.stop(error if isinstance(error, Violation) else Violation("thread died", f"{fiber.name}\n{text}"))
        fiber.done = True
        for joiner in fiber.joiners:
            self.wake(joiner)

    def _ticks(self) -> Iterator[Iterable[bool]]:
        """Answers of `tick`: the last of `_countdown` calls is True. An iterator in C, because a run
        asks all the time."""
        while True:
            yield itertools.repeat(False, self._countdown - 1)
            yield (True,)

    def _draw_countdown(self) -> int:
        return 1 + int(self.rng.expovariate(1 / self.temper.between_preemptions))

    def _switch(self) -> None:
        here = self.current
        fiber = self._next()
        if fiber is not here:
            if fiber is None:
                self._hub.switch()
            else:
                self.current = fiber
                fiber.greenlet.switch()
        if self.ending:
            raise greenlet.GreenletExit

    def _next(self) -> Fiber | None:
        """The thread that runs next; None if none ever will."""
        self.steps += 1
        self.time += _STEP_SECONDS
        if self.steps > self.step_limit:
            self.violation = Violation("livelock", f"{self.steps} steps and no end\n{self.stacks()}")
            return None
        timers = self._timers
        if timers and timers[0][0] <= self.time:
            self._fire()
        while not self._ready:
            if not timers:
                return None
            when, _, fiber, ticket = timers[0]
            if fiber.ticket != ticket or not fiber.parked or not fiber.process.alive:
                heapq.heappop(timers)
                continue
            if when > self.alarm_at:
                self.time = max(self.time, self.alarm_at)
                self.on_alarm()
                if self.violation is not None:
                    return None
                continue
            self.time = max(self.time, when)
            self._fire()
        fiber = self._choose()
        self.digest = (self.digest * 1_000_003 ^ fiber.number) & _MASK
        return fiber

    def _fire(self) -> None:
        timers = self._timers
        while timers and timers[0][0] <= self.time:
            _, _, fiber, ticket = heapq.heappop(timers)
            if fiber.ticket == ticket and fiber.parked and fiber.process.alive:
                fiber.parked = False
                fiber.timed_out = True
                self._ready.append(fiber)

    def _choose(self) -> Fiber:
        ready = self._ready
        if len(ready) == 1:
            return ready.pop()
        if not self.temper.by_priority:
            index = int(self.rng.random() * len(ready))
        else:
            index = max(range(len(ready)), key=lambda i: ready[i].priority)
            if self.rng.random() < 0.02:
                self._lowest -= 1.0
                ready[index].priority = self._lowest
        ready[index], ready[-1] = ready[-1], ready[index]
        return ready.pop()
