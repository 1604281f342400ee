"""A tier's calls of its backend: each on a thread of the tier's, waited for until a deadline, judged by a breaker."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from kvloom.bounded import get_at_most, one_line
from kvloom.contracts.observer import Event
from kvloom.contracts.storage import StorageBackend
from kvloom.errors import BackendError, CorruptBlobError, DeadlineExceeded, PartDownError, UnreadableBlobError
from kvloom.runtime import Call, NoThreadError, Runtime, Workers, lacks_resource
from kvloom.telemetry.events import EventBus
from kvloom.tiers.request_context import RequestContext
from kvloom.tiers.stored.breaker import Breaker

log = logging.getLogger(__name__)
T = TypeVar("T")

PROBE_KEY = "probe-"
"""The beginning of what a store is asked for to find out whether it answers. Nobody stores it."""
WRITE_PROBE_KEY = "spec/probe-"
"""Prefix of the keys that are written and deleted to test writing. They are records, which count for nothing."""
_PROBE_BYTES = 4096


class LocalError(BackendError):
    """This process could not take what a store had to give: not the store's fault."""


class NoRoomError(LocalError):
    """There was no memory for it."""


class DeviceFailedError(LocalError):
    """The device that was to decode it failed."""


class DecodeFailedError(UnreadableBlobError):
    """A serializer broke off at a blob with something that it should not raise."""


class Calls:
    """Threads for one backend, in groups: a question must not wait behind reads, nor an operator behind a listing.

    Reading and writing have a breaker each: a store that has become read-only, or is full, still gives hits.
    """

    def __init__(
        self, name: str, backend: StorageBackend, events: EventBus, runtime: Runtime, *, deadline: float
    ) -> None:
        self.name = name
        self.deadline = deadline
        self._backend = backend
        self._events = events
        self._now = runtime.now
        self._random = runtime.random
        self.reads = Workers(runtime, name=f"kvloom-{name}-read", threads=backend.threads)
        self.questions = Workers(runtime, name=f"kvloom-{name}-ask", threads=min(2, backend.threads))
        self.writes = Workers(runtime, name=f"kvloom-{name}-write", threads=min(2, backend.threads))
        self.chores = Workers(runtime, name=f"kvloom-{name}-chore", threads=1)
        self.orders = Workers(runtime, name=f"kvloom-{name}-order", threads=1)
        self.reading = Breaker(runtime)
        self.writing = Breaker(runtime)
        self.last_error = ""
        self.on_doubt: Callable[[], None] = lambda: None
        """Told when the store has failed, and when it is back: it may have lost what it had."""
        self._probe: Call[Any] | None = None

    # -- whether to call at all ----------------------------------------------------------------------------------------

    def serves(self, context: RequestContext) -> bool:
        """Return whether this operation may read. If the tier is paused and a probe is due, that is begun."""
        return self.name not in context.lost and not context.given_up and not self.paused

    @property
    def paused(self) -> bool:
        """Reading is not to be tried now. A probe that is due is begun, in the background."""
        if not self.reading.open:
            return False
        if self.reading.probe_is_due:
            self._begin_probe()
        return True

    @property
    def write_paused(self) -> bool:
        """Nothing is to be written now. A write may be the probe: it keeps nobody waiting."""
        return self.paused or (self.writing.open and not self.writing.probe_is_due)

    def _begin_probe(self) -> None:
        probe = self._probe
        if probe is not None and not probe.done:
            if probe.overdue_at <= self._now():
                probe.cancel()
            if probe.running:  # the last one hangs: there is no need to ask again
                return
        if not self.reading.take_probe():
            return

        def ask() -> None:
            began = self._now()
            key = self._unforeseen(PROBE_KEY)
            self._backend.contains(key)
            with suppress(CorruptBlobError, UnreadableBlobError):  # an answer, whatever lies there
                get_at_most(self._backend, key, _PROBE_BYTES)
            if self._now() - began <= self.deadline:
                self._resumed(self.reading.answered(), "reading")

        try:
            self._probe = self.questions.submit(self._reported("probe", ask), seconds=self.deadline)
        except BackendError as error:
            self.last_error = str(error)

    def try_writing(self) -> None:
        """Find out whether a store that could not be written can be again, if that is due. On the caller's thread."""
        if self.writing.open and not self.paused and self.writing.take_probe():
            key = self._unforeseen(WRITE_PROBE_KEY)
            self._backend.put(key, [b"probe"])
            self._backend.delete(key)
            self._resumed(self.writing.answered(), "writing")

    def _unforeseen(self, beginning: str) -> str:
        """A key that nobody can have put something in the way of."""
        return f"{beginning}{int(self._random() * (1 << 48)):012x}"

    # -- calling -------------------------------------------------------------------------------------------------------

    def ask(self, verb: str, function: Callable[[], T], context: RequestContext) -> T | None:
        """The answer to a short question, or None: the tier is given up for this operation."""
        call = self.begin(verb, function, context)
        return None if call is None else self.answer(verb, call, context)

    def begin(self, verb: str, function: Callable[[], T], context: RequestContext) -> Call[T] | None:
        """Put a short question, for `answer`; None if the tier is given up for this operation, or its time is spent."""
        if not self.serves(context) or context.ask_until <= self._now():
            return None
        try:
            return self.questions.submit(self.judged(verb, function, self.reading), seconds=self.deadline)
        except BackendError as error:
            self.failed(verb, error, self.reading)
            context.lost.add(self.name)
            return None

    def answer(self, verb: str, call: Call[T], context: RequestContext, *, seconds: float = math.inf) -> T | None:
        """Wait for what was asked, as long as the operation does; None: the tier is given up for it.

        seconds: wait no longer than that, if it is less.
        """
        self.wait(call, context, min(context.ask_until, self._now() + min(self.deadline, seconds), call.overdue_at))
        try:
            return call.result(self._now())
        except Exception as error:
            if not context.given_up:
                self.late(verb, error, call, self.reading)
            context.lost.add(self.name)
            return None

    def wait(self, call: Call[Any], context: RequestContext, until: float) -> None:
        """Wait for what was asked until then at most; nobody gives anything up."""
        context.waits_for(self.questions.wake)
        try:
            call.wait(until, stopped=lambda: context.given_up)
        finally:
            context.waits_for(None)

    def in_time(self, read: Call[Any], context: RequestContext) -> bool:
        """Wait for a read for as long as the operation does. If it is late, or given up, the tier is lost to it."""
        if read.done:
            return True
        context.waits_for(self.reads.wake)
        try:
            done = read.wait(context.patience(self.deadline), stopped=lambda: context.given_up)
        finally:
            context.waits_for(None)
        if not done:
            if not context.given_up:
                self.late("read", DeadlineExceeded("no answer within the deadline"), read, self.reading)
            context.lost.add(self.name)
        return done

    def judged(self, verb: str, function: Callable[[], T], breaker: Breaker) -> Callable[[], T]:
        """`function`, telling the breaker how it went, and everybody else if it failed.

        What a blob contains, or what lies in its place, is no failure of the store; nor is a part that is down.
        """

        def run() -> T:
            began = self._now()
            try:
                value = tamed(function)
            except LocalError:
                raise
            except (CorruptBlobError, UnreadableBlobError) as error:
                self.report(verb, error)
                raise
            except PartDownError as error:
                self.part_down(verb, error)
                raise
            except Exception as error:
                self.failed(verb, error, breaker)
                raise
            if self._now() - began <= self.deadline:
                self._resumed(breaker.succeeded(verb), "reading" if breaker is self.reading else "writing")
            elif breaker.open:
                breaker.probe_now()  # late, but alive
            return value

        return run

    def chore(self, verb: str, function: Callable[[], T], *, seconds: float = math.inf) -> Call[T]:
        """Queue something that nobody is kept waiting by. Raises BackendError if that thread hangs."""
        return self.chores.submit(self._reported(verb, function), seconds=seconds)

    def order(self, verb: str, function: Callable[[], T], *, seconds: float) -> Call[T]:
        """Queue what an operator wants done. Raises BackendError if that thread hangs."""
        return self.orders.submit(self._reported(verb, function), seconds=seconds)

    def _reported(self, verb: str, function: Callable[[], T]) -> Callable[[], T]:
        def run() -> T:
            try:
                return tamed(function)
            except Exception as error:
                self.report(verb, error)
                raise

        return run

    # -- judging -------------------------------------------------------------------------------------------------------

    def late(self, verb: str, error: Exception, call: Call[Any], breaker: Breaker) -> None:
        """The caller of `call` went on without it. What the function itself raised was judged where it ran."""
        if isinstance(error, DeadlineExceeded) and call.overdue_at - self._now() <= 0.1 * self.deadline:
            # Else it had hardly begun when the operation had no time left, which another tier may have taken.
            if call.running:
                self.failed(verb, error, breaker)
            else:
                self.report(verb, error)  # others were before it

    def failed(self, verb: str, error: Exception, breaker: Breaker) -> None:
        """Report an error, and count it against the store unless this machine has no thread or file for it."""
        self.report(verb, error)
        if lacks_resource(error):
            return
        self.on_doubt()
        if breaker.failed(verb):
            what = "reading" if breaker is self.reading else "writing"
            log.warning("tier=%s is paused for %s: %s", self.name, what, self.last_error)
            self._events.emit(Event("tier_paused", self.name, reason=what))

    def part_down(self, verb: str, error: PartDownError) -> None:
        """Report that a part of the store does not answer: it may have lost what it had."""
        self.report(verb, error)
        self.on_doubt()

    def report(self, verb: str, error: Exception) -> None:
        """Count and log what a store did wrong."""
        reason = "deadline" if isinstance(error, DeadlineExceeded) else type(error).__name__
        said = one_line(error)
        self.last_error = f"{verb}: {reason}: {said}"
        log.warning("tier=%s verb=%s failed: %s: %s", self.name, verb, type(error).__name__, said)
        self._events.emit(Event("tier_error", self.name, reason=f"{verb}: {reason}"))

    def _resumed(self, closed: bool, what: str) -> None:
        if closed:
            self.on_doubt()
            log.warning("tier=%s is back for %s", self.name, what)
            self._events.emit(Event("tier_resumed", self.name, reason=what))

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def stuck(self) -> bool:
        """Reads or questions would not even be begun: every thread is held by an overdue call."""
        return self.reads.stuck or self.questions.stuck

    @property
    def abandoned(self) -> int:
        """Calls past their deadline that have not returned yet."""
        return sum(workers.abandoned for workers in (self.reads, self.questions, self.writes, self.chores, self.orders))

    def close(self) -> None:
        """Have the backend closed and the threads end; what hangs is left behind."""
        close = partial(tamed, self._backend.close)
        try:
            try:
                self.orders.run(close, seconds=self.deadline)
            except NoThreadError:
                close()
        except Exception as error:
            self.report("close", error)
        for workers in (self.reads, self.questions, self.chores, self.orders):
            workers.close(self.deadline if not workers.abandoned else 0.0)


def tamed(function: Callable[[], T]) -> T:
    """Turn what a library raises outside Exception, such as a panic of native code, into a failure like any other."""
    try:
        return function()
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise BackendError(f"{type(error).__name__}: {error}") from error


def guarded(function: Callable[[], T]) -> T:
    """Run a serializer on a store's bytes. Raises CorruptBlobError or UnreadableBlobError, and nothing else.

    However it ends, it is the blob's doing and not the store's.
    """
    try:
        return tamed(function)
    except (CorruptBlobError, UnreadableBlobError):
        raise
    except Exception as error:
        raise DecodeFailedError(f"{type(error).__name__}: {error}") from error
