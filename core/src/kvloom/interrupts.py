"""Runs calls from the main thread on another thread, where no signal handler runs.

Python runs signal handlers on the main thread, between any two bytecodes, and raises their errors there, such as
KeyboardInterrupt. No lock, context manager or `finally` in Python is safe from that: the error may come between taking
a lock and the block that releases it. So the main thread only submits the call and waits. Both are single calls of C
code, which no signal handler can interrupt half-way.
"""

from __future__ import annotations

import _thread
import atexit
import contextvars
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from kvloom.device import CurrentStreams

log = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")

MOST_SECONDS = 5.0
"""Maximum time that an interrupted caller waits until its KV is left alone."""
_LOOK_SECONDS = 0.2
"""Interval at which a waiting thread looks for signals: one that comes just before it sleeps does not wake it."""
_EXIT_SECONDS = 10.0
"""Maximum time that an ending process waits for interrupted calls."""


class Interruptible(Protocol):
    """The part of a runtime that is needed here."""

    def uninterrupted(
        self, function: Callable[[], T], *, cancel: Callable[[], None] | None = None,
        discard: Callable[[T], object] | None = None, leave: bool = False,
    ) -> T: ...  # fmt: skip


class _Over:
    """The end of a call, for a thread that waits for it. `threading.Event` is Python code, which a signal handler can
    interrupt."""

    __slots__ = ("_lock", "yes")

    def __init__(self) -> None:
        self.yes = False
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def tell(self) -> None:
        self.yes = True
        self._lock.release()

    def wait(self, until: float | None = None) -> bool:
        """Return whether it came by `until`. Interrupted, it can be called again."""
        left = _LOOK_SECONDS
        while not self.yes and left > 0:
            if until is not None:
                left = until - time.monotonic()
            if self._lock.acquire(timeout=max(0.0, min(left, _LOOK_SECONDS))):
                self._lock.release()  # for the next who waits
        return self.yes


class _Work(Generic[T]):
    """A function that a server runs for the main thread."""

    __slots__ = ("_discard", "_state", "_todo", "abandoned", "error", "outcome", "over")

    def __init__(self, function: Callable[[], T], discard: Callable[[T], object] | None = None) -> None:
        # Its user removes it from here and from `outcome`, so that only one of two users finds it.
        self._todo = deque([function])
        self._discard = discard
        self._state = _ThreadState()
        self.abandoned = False
        """The caller does not wait any more. If the call has not begun, it never will."""
        self.error: BaseException | None = None
        self.outcome: deque[T] = deque()
        self.over = _Over()

    def run(self) -> None:
        try:
            function = self._todo.pop()
        except IndexError:
            return
        try:
            if not self.abandoned:
                self.outcome.append(self._state.run(function))
        except BaseException as error:
            self.error = error
        del function
        self.over.tell()
        if self.abandoned:
            self.drop()

    def drop(self) -> None:
        """Discard the function's result, if there is one and it was not taken."""
        try:
            value = self.outcome.pop()
        except IndexError:
            return
        if self._discard is not None:
            try:
                self._discard(value)
            except Exception:
                log.exception("the result of an interrupted call could not be discarded")


class _ThreadState:
    """Context variables of the thread that makes this, and torch's settings for that thread alone."""

    __slots__ = ("_context", "_grad", "_inference", "_streams")

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        torch = sys.modules.get("torch")
        self._inference = torch is not None and torch.is_inference_mode_enabled()
        self._grad = torch is None or torch.is_grad_enabled()
        self._streams = CurrentStreams()

    def run(self, function: Callable[[], T]) -> T:
        if self._grad and not self._inference and not self._streams:
            return self._context.run(function)
        import torch

        with ExitStack() as settings:
            modes: list[AbstractContextManager[Any]] = [self._streams.current()]
            if self._inference:
                modes.append(torch.inference_mode())
            if not self._grad:
                modes.append(torch.no_grad())
            for mode in modes:
                settings.enter_context(mode)
            return self._context.run(function)


class _Servers:
    """Threads that run calls for the main thread: one, and another where that one is at work still."""

    def __init__(self, main: int) -> None:
        self.main = main
        self._calls: queue.SimpleQueue[_Work[Any]] = queue.SimpleQueue()
        self._last: _Over | None = None
        self._unfinished: deque[_Over] = deque(maxlen=64)
        # Only ever taken by servers.
        self._changing = _thread.allocate_lock()
        self._idle = 0

    def call(
        self, function: Callable[[], T], *, cancel: Callable[[], None] | None, discard: Callable[[T], object] | None,
        leave: bool,
    ) -> T:  # fmt: skip
        call = _Work(function, discard)
        last, self._last = self._last, call.over
        if (last is None or not last.yes) and not self._add():
            return function()  # the interpreter is going away, or the machine has no more threads
        try:
            self._calls.put(call)
            call.over.wait()
            if call.error is None:
                return call.outcome[0]
        except BaseException:
            self._abandon(call, cancel, wait=not leave)
            raise
        error, call.error = call.error, None
        try:
            raise error
        finally:
            del error  # else it would be in a cycle with this frame, and hold what its traceback refers to

    def _abandon(self, call: _Work[Any], cancel: Callable[[], None] | None, *, wait: bool) -> None:
        """Return when the call is cancelled or, without `cancel`, over and its result discarded."""
        call.abandoned = True
        until = time.monotonic() + MOST_SECONDS
        tidy = _Work(partial(_tidy, call, cancel, until if wait and cancel is None else 0.0))
        while True:
            try:
                self._unfinished.append(call.over)
                self._add()
                self._calls.put(call)  # again, because it may not have been queued
                self._calls.put(tidy)
                if wait and not tidy.over.wait(until):
                    log.error("an interrupted call is still under way after %.0f seconds", MOST_SECONDS)
                return
            except BaseException:  # another interrupt, while the first is on its way: wait all the same
                continue

    def _add(self) -> bool:
        """Begin a server. `threading` starts threads with Python code, so another thread has to do it."""
        try:
            _thread.start_new_thread(self._start, ())
        except RuntimeError:
            return False
        return True

    def _start(self) -> None:
        try:
            threading.Thread(target=self._serve, name="kvloom-verbs", daemon=True).start()
        except RuntimeError:  # there is no thread left but this one
            self._serve()

    def _serve(self) -> None:
        while True:
            with self._changing:
                if self._idle > self._calls.qsize():
                    return
                self._idle += 1
            call = self._calls.get()
            with self._changing:
                self._idle -= 1
            call.run()
            del call

    def finish(self) -> None:
        """Wait for calls that were interrupted: a process must not end while one of them is in torch."""
        until = time.monotonic() + _EXIT_SECONDS
        while self._unfinished:
            self._unfinished.popleft().wait(until)


def _tidy(call: _Work[Any], cancel: Callable[[], None] | None, until: float) -> None:
    try:
        if cancel is not None:
            cancel()
    finally:
        if call.over.wait(until):
            call.drop()  # else it is dropped when it is over


_servers = _Servers(threading.main_thread().ident or 0)
atexit.register(lambda: _servers.finish())


def _in_child() -> None:
    global _servers
    _servers = _Servers(_thread.get_ident())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def uninterrupted(
    function: Callable[[], T], *, cancel: Callable[[], None] | None = None,
    discard: Callable[[T], object] | None = None, leave: bool = False,
) -> T:  # fmt: skip
    """Call a function where no signal handler runs, so that none can raise in the middle of it; return what it returns.

    On the main thread that is another thread; elsewhere it is called directly. If a handler raises meanwhile, the error
    reaches the caller: at once with `leave`; else when `cancel` has returned or, without one, when the function is
    over, after five seconds at most. discard: called with a result that comes later.
    """
    if _thread.get_ident() != _servers.main:
        return function()
    return _servers.call(function, cancel=cancel, discard=discard, leave=leave)


class _Has(Protocol):
    @property
    def _runtime(self) -> Interruptible: ...


S = TypeVar("S", bound=_Has)


def shielded(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Have a method run uninterrupted. An interrupted caller waits for its end, as it may use the caller's memory."""

    @wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._runtime.uninterrupted(partial(method, self, *args, **kwargs))

    return run


def shielded_waiting(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """`shielded`, for a method that uses no memory of the caller's: an interrupted caller leaves at once."""

    @wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._runtime.uninterrupted(partial(method, self, *args, **kwargs), leave=True)

    return run
