"""Reads under way: two that want one chunk at one time share one call of the backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvloom.errors import BackendError
from kvloom.runtime import Call, Runtime
from kvloom.tiers.request_context import RequestContext
from kvloom.tiers.stored.calls import Calls
from kvloom.tiers.tier import Loaded
from kvloom.types import ChunkKey

R = TypeVar("R")


class InflightRead:
    """One call that reads one chunk."""

    __slots__ = ("call", "failed", "key", "shares", "starved")

    call: Call[Loaded | None]

    def __init__(self, key: ChunkKey) -> None:
        self.key = key
        self.shares = 1
        self.failed = False
        """It raised: the tier is not to be asked again by those who waited."""
        self.starved = False
        """It waits for memory: who has some of it in use should not wait for this."""


class Read:
    """One reader's share of a flight. Give it to `leave` or to `give_up`, once."""

    __slots__ = ("context", "flight")

    def __init__(self, flight: InflightRead, context: RequestContext) -> None:
        self.flight = flight
        self.context = context

    @property
    def done(self) -> bool:
        """There is nothing to wait for."""
        return self.flight.call.done

    def wait(self, until: float, *, stopped: Callable[[], bool]) -> bool:
        """Whether it was done by `until`, unless `stopped()` came first."""
        return self.flight.call.wait(until, stopped=stopped)


class InflightReads:
    """The reads of one tier."""

    def __init__(self, calls: Calls, runtime: Runtime) -> None:
        self._calls = calls
        self.lock = runtime.lock()
        """Held while a read begins or ends, so that nobody begins another of the same chunk."""
        self._open: dict[ChunkKey, InflightRead] = {}

    def board(
        self, key: ChunkKey, load: Callable[[], Loaded | None], context: RequestContext, *,
        instead: Callable[[], R | None] = lambda: None,
    ) -> Read | R | None:  # fmt: skip
        """Share the call that reads `key`, or begin one; None if the tier cannot take it.

        instead: asked under the lock for another way to get it, which goes before.
        """
        judged = self._calls.judged("read", load, self._calls.reading)
        try:
            with self.lock:
                other = instead() or self.share(key, context)
                if other is None:
                    flight = InflightRead(key)
                    run = partial(self._land, flight, judged)
                    flight.call = self._calls.reads.submit(run, seconds=self._calls.deadline, discard=release)
                    self._open[key] = flight
                    other = Read(flight, context)
        except BackendError as error:
            self._calls.failed("read", error, self._calls.reading)
            context.lost.add(self._calls.name)
            return None
        return other

    def share(self, key: ChunkKey, context: RequestContext) -> Read | None:
        """Share the call that reads `key`, if there is one. Under the lock."""
        flight = self._open.get(key)
        if flight is None:
            return None
        flight.shares += 1
        return Read(flight, context)

    def under_way(self, key: ChunkKey) -> bool:
        """Whether some call reads `key`. Under the lock."""
        return key in self._open

    def starve(self, key: ChunkKey) -> None:
        """The call that reads `key` waits for memory."""
        with self.lock:
            flight = self._open.get(key)
            if flight is not None:
                flight.starved = True
        self._calls.reads.wake()

    def leave(self, read: Read) -> Loaded | None:
        """Wait for what the call reads: a lease of its own, or None. A tier that is late is lost to the visit."""
        flight, context = read.flight, read.context
        if not self._calls.in_time(flight.call, context):
            self.give_up(read)
            return None
        return self._share(flight, context)

    def give_up(self, read: Read) -> None:
        """Do not wait. The call is given up with its last share."""
        flight = read.flight
        with self.lock:
            flight.shares -= 1
            last = not flight.shares
            if last:
                self._forget(flight)
        if last:
            flight.call.cancel()

    def _land(self, flight: InflightRead, load: Callable[[], Loaded | None]) -> Loaded | None:
        try:
            return load()
        except Exception:  # judged and told of already
            flight.failed = True
            return None
        finally:
            with self.lock:  # from now on it is in memory, or not to be had
                self._forget(flight)

    def _share(self, flight: InflightRead, context: RequestContext) -> Loaded | None:
        loaded = flight.call.peek()
        if flight.failed:
            context.lost.add(self._calls.name)
        with self.lock:
            flight.shares -= 1
            last = not flight.shares
            mine = loaded if last or loaded is None else loaded.again()
        return mine

    def _forget(self, flight: InflightRead) -> None:
        if self._open.get(flight.key) is flight:
            del self._open[flight.key]


def release(loaded: Loaded | None) -> None:
    """Of a chunk that nobody waits for any more, if there is one."""
    if loaded is not None:
        loaded.release()
