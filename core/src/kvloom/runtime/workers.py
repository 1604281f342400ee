"""Worker threads: calls with a deadline, alone or many in a batch, that can be given up."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvloom.errors import BackendError, DeadlineExceeded
from kvloom.runtime.system import Runtime, Thread

log = logging.getLogger(__name__)
T = TypeVar("T")


class Call(Generic[T]):
    """A result under way on a worker: wait for it, or give it up."""

    __slots__ = ("_awaited", "_batch", "_discard", "_error", "_given_up", "_seconds", "_state", "_value", "_workers")

    def __init__(self, workers: Workers, batch: Batch[T], seconds: float, discard: Callable[[T], None] | None) -> None:
        self._workers = workers
        self._batch = batch
        self._seconds = seconds
        self._discard = discard
        self._state = "queued"  # -> running -> done;  queued -> cancelled
        self._awaited = False
        self._given_up = False
        self._value: T | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._state in ("done", "cancelled")

    @property
    def running(self) -> bool:
        return self._state == "running"

    @property
    def overdue_at(self) -> float:
        """Time at which it will be overdue: its seconds after it was queued, then after it has begun, then after the
        function last gave a result or went on."""
        return self._batch.since + self._seconds

    def result(self, until: float | None = None) -> T:
        """The function's result or error.

        At `until` (default: after its seconds in the queue, or its seconds of running) it is abandoned with
        DeadlineExceeded. A call that has not begun then never will; a running one continues in its own thread, with its
        own buffers.
        """
        if not self.wait(until):
            self.cancel()
            raise DeadlineExceeded(f"{self._workers.name}: no answer within the deadline")
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                error = None  # else it would be in a cycle with this frame, and hold what its traceback refers to
        if self._state == "cancelled":
            raise BackendError(f"{self._workers.name}: cancelled")
        return self._value  # type: ignore[return-value]

    def wait(self, until: float | None = None, *, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Wait; return whether the call was done by `until` (default: before it was overdue).

        stopped: called whenever the workers are woken; waiting ends once it returns True.
        """
        workers = self._workers
        with workers._changed:
            self._awaited = True
            while not self.done and not stopped():
                left = (self.overdue_at if until is None else until) - workers.now()
                if left <= 0:
                    return False
                workers._changed.wait(min(left, 3600.0))
            return self.done

    def peek(self) -> T | None:
        """The function's result, left where it is; None if it has not returned, or has raised."""
        return self._value

    def cancel(self) -> bool:
        """Cancel the call without waiting; return whether it had not begun, and now never will.

        Its result, now or later, is passed to `discard`.
        """
        return self._workers._give_up(self)


class Batch(Generic[T]):
    """A function that one thread runs, and the calls to which it gives a result each, one after the other."""

    __slots__ = ("_function", "_workers", "calls", "since")

    def __init__(
        self, workers: Workers, function: Callable[[Batch[T]], object], count: int, seconds: float,
        discard: Callable[[T], None] | None,
    ) -> None:  # fmt: skip
        self._workers = workers
        self._function: Callable[[Batch[T]], object] | None = function
        self.since = workers.now()
        """Time at which it was queued, then began, then last gave a result or went on."""
        self.calls = [Call(workers, self, seconds, discard) for _ in range(count)]

    def wanted(self, number: int) -> bool:
        """Return whether anybody still waits for that call."""
        call = self.calls[number]
        return call.running and not call._given_up

    def absorb(self, call: Call[T]) -> int | None:
        """Take over a call submitted alone that waits in the same queue, to give it its result too: its number here.
        None if it has begun, or was cancelled."""
        return self._workers._move(call, self)

    def progress(self) -> None:
        """The function goes on: from now on its calls have their full seconds again."""
        self.since = self._workers.now()

    def give(self, number: int, value: T | None) -> None:
        """Give call `number` its result. Once for each call; the others get None when the function returns."""
        self._workers._settle(self.calls[number], value)


class NoThreadError(BackendError):
    """The machine has no thread for a call."""


_NO_THREAD = ("can't start new thread", "failed to spawn thread")
"""The words of the interpreter, which raises RuntimeError, and of Rust, whose panics are no Exception."""
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_MOST_CAUSES = 16
"""Maximum length of a chain of errors that is looked at: a library may make one without an end."""


def lacks_resource(error: BaseException | None) -> bool:
    """Return whether this, or an error that led to it, is that this machine has no more threads or file descriptors."""
    for _ in range(_MOST_CAUSES):
        if error is None:
            break
        if isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR:
            return True
        of_threads = isinstance(error, RuntimeError) or not isinstance(error, Exception)
        if of_threads and any(words in str(error) for words in _NO_THREAD):
            return True
        error = error.__cause__ or error.__context__
    return False


class Workers:
    """A fixed number of daemon threads. A call that outlives its deadline keeps its thread until it returns."""

    def __init__(self, runtime: Runtime, *, name: str, threads: int) -> None:
        self.name = name
        self.threads = threads
        self.now = runtime.now
        self._runtime = runtime
        self._changed = runtime.condition()
        self._queue: deque[Batch[Any]] = deque()
        self._started: list[Thread] = []
        self._idle = 0
        self._given_up: set[Call[Any]] = set()
        self._closed = False

    @property
    def stuck(self) -> bool:
        """Every thread is held by an overdue call that was given up: nothing submitted now would be begun."""
        return len(self._given_up) >= self.threads and self.abandoned >= self.threads

    @property
    def abandoned(self) -> int:
        """Number of threads held by overdue calls that were abandoned and have not returned yet. Calls that were only
        cancelled do not count."""
        now = self._runtime.now()
        return len({call._batch for call in tuple(self._given_up) if call.overdue_at <= now})

    def submit(
        self, function: Callable[[], T], *, seconds: float = math.inf, discard: Callable[[T], None] | None = None
    ) -> Call[T]:
        """Queue `function`, which may wait `seconds` and then run `seconds`.

        discard: called with the result if the caller does not wait any more. Raises BackendError if all threads are
        stuck, if there is none and none can be started, or if the workers are closed.
        """
        return self.submit_batch(lambda batch: batch.give(0, function()), 1, seconds=seconds, discard=discard)[0]

    def submit_batch(
        self, function: Callable[[Batch[T]], object], count: int, *, seconds: float = math.inf,
        discard: Callable[[T], None] | None = None,
    ) -> list[Call[T]]:  # fmt: skip
        """Queue a function that gives `count` results to the batch it is called with; a call for each of them.

        seconds: as for `submit`, between two results too. What it raises is the error of the calls that have no result
        yet.
        """
        batch = Batch(self, function, count, seconds, discard)
        stuck = self.stuck
        with self._changed:
            if self._closed:
                raise BackendError(f"{self.name}: closed")
            if stuck:
                raise BackendError(f"{self.name}: all {self.threads} threads are held by calls past their deadline")
            self._queue.append(batch)
            grow = self._idle < len(self._queue) and len(self._started) < self.threads
            if grow:
                try:
                    self._started.append(self._runtime.spawn(self._work, name=f"{self.name}-{len(self._started)}"))
                except RuntimeError as error:  # the machine has no more threads
                    if self.abandoned >= len(self._started):  # nor is there one here that would take it
                        self._queue.pop()
                        raise NoThreadError(f"{self.name}: {error}") from error
            self._changed.notify_all()
        return batch.calls

    def wake(self) -> None:
        """Make all threads that wait for a call check again whether to continue waiting."""
        with self._changed:
            self._changed.notify_all()

    def run(self, function: Callable[[], T], *, seconds: float) -> T:
        """`submit` and `result` in one."""
        return self.submit(function, seconds=seconds).result()

    def close(self, timeout: float, *, finish: bool = False) -> None:
        """Cancel calls that have not begun, and wait up to `timeout` seconds for the others. finish: begin them, until
        then."""
        until = self._runtime.now() + timeout
        with self._changed:
            self._closed = True
            if not finish:
                self._cancel_queued()
            self._changed.notify_all()
        for thread in self._started:
            thread.join(max(0.0, until - self._runtime.now()))
        with self._changed:
            self._cancel_queued()

    def _cancel_queued(self) -> None:
        for batch in self._queue:
            for call in batch.calls:
                call._state = "cancelled"
            batch._function = None
        self._queue.clear()

    def _move(self, call: Call[Any], into: Batch[Any]) -> int | None:
        with self._changed:
            if call._state != "queued":
                return None
            self._queue.remove(call._batch)
            call._batch._function = None
            call._batch, call._state = into, "running"
            into.calls.append(call)
            return len(into.calls) - 1

    def _give_up(self, call: Call[Any]) -> bool:
        value = None
        with self._changed:
            if call._state == "queued":
                call._state = "cancelled"
                batch = call._batch
                if all(each.done for each in batch.calls):
                    with contextlib.suppress(ValueError):
                        self._queue.remove(batch)
                    batch._function = None
                return True
            if call._state == "running":
                call._given_up = True
                self._given_up.add(call)
                return False
            discard, call._discard = call._discard, None
            value, call._value = call._value, None
        if discard is not None and value is not None:
            discard(value)
        return False

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._queue and not self._closed:
                    self._changed.wait()
                self._idle -= 1
                if not self._queue:
                    return
                batch = self._queue.popleft()
                for call in batch.calls:
                    if call._state == "queued":
                        call._state = "running"
                batch.since = self._runtime.now()
                function, batch._function = batch._function, None
            assert function is not None
            self._run(batch, function)
            del batch, function, call

    def _run(self, batch: Batch[Any], function: Callable[[Batch[Any]], object]) -> None:
        error = None
        try:
            function(batch)
        except BaseException as caught:  # a plugin may raise anything; it is the caller's to judge
            error = caught
        for call in batch.calls:
            if call.running:
                self._settle(call, None, error)

    def _settle(self, call: Call[Any], value: Any, error: BaseException | None = None) -> None:
        with self._changed:
            given_up = call._given_up or not call.running
            self._given_up.discard(call)
            call._batch.since = self._runtime.now()
            if not given_up:
                call._value, call._error = value, error
            if call.running:
                call._state = "done"  # last: `done` and `peek` take no lock
            if call._awaited:
                self._changed.notify_all()
        if given_up and value is not None and call._discard is not None:
            call._discard(value)
