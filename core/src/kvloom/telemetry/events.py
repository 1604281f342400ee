"""Events: always counted, and passed to observers from a queue, so that no observer is on the hot path."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, get_args

from kvloom.contracts.observer import ChunkEvent, CounterKey, Event, EventName, Observer, Request, Totals, Watched
from kvloom.forks import notify_after_fork
from kvloom.types import ChunkKey

if TYPE_CHECKING:
    from kvloom.runtime import Runtime, Thread

log = logging.getLogger(__name__)

QUEUE_EVENTS = 4096
"""Maximum number of events queued for slow observers; beyond it the oldest are lost."""
QUEUE_REQUESTS = 1024
"""Maximum number of queued requests."""
REQUEST_BYTES = 64 << 20
"""Maximum size of their keys."""
CHUNK_EVENT_BYTES = 64 << 20
"""Maximum size of the keys and tokens in queued chunk events."""
MOST_COUNTERS = 4096
"""Sums that are kept apart; many times what there is for ten tiers."""
MOST_REASON_CHARS = 80
OTHER = "other"
_NAMES = frozenset(get_args(EventName)) | {"observer_error", "observer_lost"}
GATHER_SECONDS = 0.02
"""Time that observers sleep after something happened, so that the verb that caused it does not share its processor, or
the interpreter's lock, with them."""
_LOOKS = 50
"""Number of times that the thread polls for more before it waits to be woken."""
_KEY_BYTES = 256
"""Approximate size of an event about one chunk, or of a key in a request."""


Callers = Sequence[tuple[Observer, object]]
"""The values that observers with `sees_requests` returned when a request began."""


Blamed = Callable[[], AbstractContextManager[None]]
"""A context that adds the place in the configuration to errors raised within."""


class EventBus:
    """Reports everything that happens to KV to the observers."""

    def __init__(
        self, observers: Sequence[Observer], runtime: Runtime, *, blamed: Sequence[Blamed] | None = None
    ) -> None:  # fmt: skip
        """Takes ownership of the observers: `close` closes them. blamed: for each, the context in which it begins to
        watch."""
        self._observers = tuple(observers)
        self._blamed = tuple(blamed) if blamed is not None else (nullcontext,) * len(self._observers)
        self._runtime = runtime
        self._changed = runtime.condition()
        self._sums: dict[tuple[str, str, str], list[float]] = {}
        self._queue: deque[Event] = deque()
        self._chunks: deque[ChunkEvent] = deque()
        self._chunk_bytes = 0
        self.sees_chunks = any(observer.sees_chunks for observer in self._observers)
        """An observer wants chunk events; check before making a `ChunkEvent`."""
        self.sees_requests = any(observer.sees_requests for observer in self._observers)
        """An observer wants requests; check before making a request trace."""
        self._requests: deque[tuple[Request, Callers]] = deque()
        self._request_bytes = 0
        self._failed: set[str] = set()
        self._busy = False
        self._asleep = False
        """The thread waits for something to happen."""
        self._hurried = False
        """A thread waits until everything has been delivered."""
        self._closed = False
        self._thread: Thread | None = None
        notify_after_fork(self)
        if self._observers:
            self._thread = runtime.spawn(self._deliver, name="kvloom-events")

    def after_fork_in_child(self, pid: int) -> None:
        self._changed = self._runtime.condition()
        self._closed = True

    def emit(self, event: Event) -> None:
        """Count, and queue for the observers. Never waits for them, never raises because of one.

        A reason is one of few words: a longer text, which may be new each time, becomes `other`.
        """
        if len(event.reason) > MOST_REASON_CHARS:
            event = replace(event, reason=OTHER)
        with self._changed:
            self._count(event.name, event.tier, event.reason, event)
            if self._thread is None or self._closed:
                return
            if len(self._queue) >= QUEUE_EVENTS:
                self._queue.popleft()
                self._count("observer_lost", "", "queue full")
            self._queue.append(event)
            self._wake()

    def emit_chunks(self, event: ChunkEvent) -> None:
        """Queue for the observers that see chunks, as `emit` does. Not counted."""
        with self._changed:
            if not self.sees_chunks or self._closed:
                return
            self._chunks.append(event)
            self._chunk_bytes += _size(event)
            while self._chunk_bytes > CHUNK_EVENT_BYTES:
                self._chunk_bytes -= _size(self._chunks.popleft())
                self._count("observer_lost", "", "chunks")
            self._wake()

    def watch(self, engine: Watched) -> None:
        """Have the observers watch an engine. Raises their errors."""
        for observer, blamed in zip(self._observers, self._blamed, strict=True):
            with blamed():
                observer.watch(engine)

    def callers(self) -> Callers:
        """Collect what each observer wants to remember about the calling thread."""
        said = []
        for observer in self._observers:
            if observer.sees_requests:
                try:
                    said.append((observer, observer.caller()))
                except (KeyboardInterrupt, SystemExit):  # of a signal handler: this is the caller's thread
                    raise
                except BaseException as error:
                    self._runtime.uninterrupted(partial(self._blame, observer, error), leave=True)
        return said

    def emit_request(self, request: Request, callers: Callers) -> None:
        """Queue for the observers that see requests, as `emit` does. Not counted."""
        with self._changed:
            if self._closed:
                return
            self._requests.append((request, callers))
            self._request_bytes += _size_of(request)
            while len(self._requests) > QUEUE_REQUESTS or self._request_bytes > REQUEST_BYTES:
                self._request_bytes -= _size_of(self._requests.popleft()[0])
                self._count("observer_lost", "", "requests")
            self._wake()

    def came(self, tier: str, keys: Sequence[ChunkKey], *, in_memory: bool = False) -> None:
        """Tell observers of chunks that a tier holds these now."""
        if self.sees_chunks and keys:
            self.emit_chunks(ChunkEvent("stored", tier, in_memory, tuple(keys)))

    def left(self, tier: str, keys: Sequence[ChunkKey], *, in_memory: bool = False) -> None:
        """Tell observers of chunks that a tier does not hold these any more."""
        if self.sees_chunks and keys:
            self.emit_chunks(ChunkEvent("removed", tier, in_memory, tuple(keys)))

    def counters(self) -> Mapping[CounterKey, Totals]:
        """The sums so far: a copy."""
        with self._changed:
            snapshot = {key: tuple(sums) for key, sums in self._sums.items()}
        return {
            CounterKey(*key): Totals(int(count), int(chunks), int(tokens), int(nbytes), seconds)
            for key, (count, chunks, tokens, nbytes, seconds) in snapshot.items()
        }

    def flush(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until every event so far was told; whether it was."""
        until = self._runtime.now() + timeout
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            while self._waiting or self._busy:
                left = until - self._runtime.now()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def close(self, timeout: float = 5.0) -> None:
        """Deliver the queue, then close the observers, except one that is stuck in an event. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._thread is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            log.warning("observers did not finish within %.1f s; events are lost", timeout)
            return
        for observer in self._observers:
            try:
                observer.close()
            except BaseException as error:
                self._blame(observer, error)

    def _count(self, name: str, tier: str, reason: str, event: Event | None = None) -> None:
        sums = self._sums.get((name, tier, reason))
        if sums is None and len(self._sums) >= MOST_COUNTERS:
            name, tier, reason = name if name in _NAMES else OTHER, "", OTHER
            sums = self._sums.get((name, tier, reason))
        if sums is None:
            sums = self._sums[name, tier, reason] = [0, 0, 0, 0, 0.0]
        sums[0] += 1
        if event is not None:
            sums[1] += event.chunks
            sums[2] += event.tokens
            sums[3] += event.bytes
            sums[4] += event.seconds

    def _wake(self) -> None:
        """Something is to be told: with the lock held."""
        if self._asleep:
            self._asleep = False
            self._changed.notify_all()

    def _deliver(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                if not self._waiting:
                    self._rest()
                if not self._waiting:
                    return
                calls = self._next()
                self._busy = True
            for observer, call in calls:
                try:
                    call()
                except BaseException as error:  # a panic of native code is one
                    self._blame(observer, error)

    def _rest(self) -> None:
        """Wait for more, because everything is delivered. Holds the lock.

        While much happens the thread polls, because waking it each time would cost the caller.
        """
        self._hurried = False
        self._changed.notify_all()
        for _ in range(_LOOKS):
            if self._waiting or self._closed:
                return
            self._changed.wait(GATHER_SECONDS)
        self._asleep = True
        while not (self._waiting or self._closed):
            self._changed.wait()
        self._asleep = False
        if not (self._hurried or self._closed):
            self._changed.wait(GATHER_SECONDS)

    @property
    def _waiting(self) -> bool:
        return bool(self._queue or self._chunks or self._requests)

    def _next(self) -> list[tuple[Observer, Callable[[], None]]]:
        """The observers to notify next, each with its call."""
        if self._queue:
            event = self._queue.popleft()
            return [(observer, partial(observer.on_event, event)) for observer in self._observers]
        if self._requests:
            request, callers = self._requests.popleft()
            self._request_bytes -= _size_of(request)
            return [(observer, partial(observer.on_request, request, caller)) for observer, caller in callers]
        chunks = self._chunks.popleft()
        self._chunk_bytes -= _size(chunks)
        return [(one, partial(one.on_chunks, chunks)) for one in self._observers if one.sees_chunks]

    def _blame(self, observer: Observer, error: BaseException) -> None:
        with self._changed:
            self._count("observer_error", "", observer.type)
            first = observer.type not in self._failed
            self._failed.add(observer.type)
        if first:
            log.warning("observer %s failed; further failures are only counted", observer.type, exc_info=error)


def _size(event: ChunkEvent) -> int:
    return len(event.tokens) + _KEY_BYTES * (1 + len(event.keys) + len(event.segments))


def _size_of(request: Request) -> int:
    return _KEY_BYTES * (1 + len(request.keys) + len(request.pieces))
