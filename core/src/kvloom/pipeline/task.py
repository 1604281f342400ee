"""Loads and saves under way, and the promise that a cancelled one leaves the caller's KV alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch

from kvloom.errors import DeadlineExceeded
from kvloom.interrupts import shielded, shielded_waiting
from kvloom.runtime import Runtime

T = TypeVar("T")


class Cancellation:
    """Ends a load or save: once `cancel` has returned, nothing more is written to or read from the caller's KV."""

    def __init__(self, runtime: Runtime) -> None:
        # Held while the caller's KV is touched, so that cancelling waits for a copy but never for a tier.
        self._touching = runtime.lock()
        self._cancelled = False
        self._give_up: Callable[[], None] | None = None

    @property
    def cancelled(self) -> bool:
        """Somebody has asked it to stop; what was moved before counts."""
        return self._cancelled

    def cancel(self) -> None:
        """Stop as soon as the copy under way, if any, is over, and give back what is held. Twice is fine."""
        self._cancelled = True  # before, or the next copies might get the lock first
        with self._touching:
            pass
        give_up = self._give_up
        if give_up is not None:
            give_up()

    def stop(self) -> None:
        """Stop before the next copy, without waiting for the one under way."""
        self._cancelled = True

    def copied(self) -> None:
        """Note that it has copied all that it has to."""

    def stalled(self, waits: bool) -> None:
        """Note that it waits for room with something left to copy, or does no longer."""

    def on_cancel(self, give_up: Callable[[], None]) -> None:
        """Have `give_up` called when this is cancelled; now, if it was already."""
        self._give_up = give_up
        if self._cancelled:
            give_up()

    def touch(self, copy: Callable[[], None]) -> bool:
        """Copy to or from the caller's KV; False if this was cancelled."""
        with self._touching:
            if self._cancelled:
                return False
            copy()
            return True


class Foreground:
    """The verbs of an engine that callers wait for: when it is closed they end before its parts are closed under them.

    A verb takes no lock here unless the engine is being closed.
    """

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


class Stalls:
    """The saves on an engine's threads that wait for room, with something left to copy."""

    def __init__(self, runtime: Runtime, threads: int) -> None:
        self._now = runtime.now
        self._lock = runtime.lock()
        self._threads, self._stalled = threads, 0
        self.all_since: float | None = None
        """Time since when all threads have been stalled, so that nothing else begins; None: some thread goes on."""

    def add(self, waits: bool) -> None:
        with self._lock:
            self._stalled += 1 if waits else -1
            self.all_since = self._now() if self._stalled >= self._threads else None


class Task(Cancellation):
    """A load or save under way in the background.

    Once `cancel` has returned, or `result` has raised DeadlineExceeded, nothing more is written to or read from the
    caller's KV.
    """

    def __init__(self, runtime: Runtime, stalls: Stalls | None = None) -> None:
        """stalls: those of the threads that it runs on."""
        super().__init__(runtime)
        self._runtime = runtime
        self._stalls = Stalls(runtime, 1) if stalls is None else stalls
        self._changed = runtime.condition()
        self._begun = self._copied = self._done = False
        self._stalled_since: float | None = None
        self._then: list[Callable[[], None]] = []
        self._mask: torch.Tensor | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """It is over: there is a result, or an error."""
        return self._done

    def result(self, timeout: float | None = None) -> torch.Tensor:
        """The mask of the segments that were moved (bool, one entry per segment).

        Raises DeadlineExceeded, the task being cancelled, if it takes longer than `timeout` seconds.
        """
        if not self.wait(math.inf if timeout is None else timeout):
            self.cancel()
            raise DeadlineExceeded(f"not done within {timeout} seconds")
        if self._error is not None:
            raise self._error
        assert self._mask is not None
        return self._mask

    def wait(self, timeout: float) -> bool:
        """Return whether it is done, after at most `timeout` seconds. Nothing is cancelled."""
        return self._done or self._wait(timeout)

    @shielded_waiting
    def wait_for_copies(self, timeout: float, *, stalled: float = math.inf) -> bool:
        """Return whether a save has copied all that it has to, after at most `timeout` seconds. Its writes to slow
        tiers may still have to wait. Nothing is cancelled.

        stalled: how long to wait, in seconds, while it waits for room, or cannot begin since all threads do.
        """
        began = self._runtime.now()
        with self._changed:
            while not (self._done or self._copied):
                now, until = self._runtime.now(), began + timeout
                since = self._stalled_since if self._begun else self._stalls.all_since
                if since is not None:
                    until = min(until, max(since, began) + stalled)
                if now >= until:
                    return False
                self._changed.wait(min(until - now, 3600.0 if self._begun else stalled))
            return True

    @shielded_waiting
    def _wait(self, timeout: float) -> bool:
        until = self._runtime.now() + timeout
        with self._changed:
            while not self._done and (left := until - self._runtime.now()) > 0:
                self._changed.wait(min(left, 3600.0))
            return self._done

    @shielded
    def cancel(self) -> None:
        """Stop as soon as the copy under way, if any, is over, and give back what is held. Twice is fine."""
        super().cancel()

    def after_fork_in_child(self, error: BaseException) -> None:
        """End it in a forked child, where nobody works on it."""
        self._touching, self._changed = self._runtime.lock(), self._runtime.condition()
        self._give_up = None
        self.fail(error)

    def copied(self) -> None:
        with self._changed:
            self._copied = True
            self._changed.notify_all()

    def stalled(self, waits: bool) -> None:
        with self._changed:
            self._stalled_since = self._runtime.now() if waits else None
            self._changed.notify_all()
        self._stalls.add(waits)

    @shielded
    def when_done(self, callback: Callable[[], None]) -> None:
        """Call it once this is over, on the thread that ends it; now, if it is. It must neither raise nor block."""
        with self._changed:
            if not self._done:
                self._then.append(callback)
                return
        callback()

    def fail(self, error: BaseException) -> None:
        """End a task whose work will never be done."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            if self._done:
                return
            self._error, self._done = error, True
            self._changed.notify_all()
            then, self._then = self._then, []
        for callback in then:
            callback()

    def run(self, work: Callable[[Task], torch.Tensor]) -> None:
        """Do the work and keep its mask, or what it raised. Called once, by the engine."""
        with self._changed:
            self._begun = True
            self._changed.notify_all()
        try:
            self._mask = work(self)
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)
