"""The write queue of a stored tier: bounded, in the background, and never a reason for the caller to be stuck."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kvloom.errors import BackendError
from kvloom.runtime import Call, Runtime, Workers
from kvloom.telemetry.request_trace import NO_TRACE, RequestTrace
from kvloom.tiers.request_context import HURRIED_SHARE
from kvloom.tiers.tier import Loaded
from kvloom.types import ChunkKey


@dataclass(eq=False, slots=True)
class Write:
    """One accepted write."""

    key: ChunkKey
    loaded: Loaded
    began: float | None = None
    outcome: bool | None = None
    """True: stored. False: failed or dropped. None: still under way."""
    call: Call[None] | None = field(default=None, repr=False)
    record: RequestTrace = field(default=NO_TRACE, repr=False)
    """Held until there is an outcome."""


class WriteQueue:
    """At most `max_bytes` of chunks wait or are being written; a write past its deadline is given up.

    A write keeps its lease until the backend's call returns, so that memory under a call that hangs is never reused.
    Deadlines are looked after whenever somebody submits or waits; nothing ticks.
    """

    def __init__(
        self,
        workers: Workers,
        runtime: Runtime,
        *,
        deadline: float,
        max_bytes: int,
        on_lost: Callable[[Write, str], None],
        on_late: Callable[[], None],
    ) -> None:
        """on_lost: told of everything that is not written, and why. on_late: told when a call was overdue."""
        self.workers = workers
        self._runtime = runtime
        self._deadline = deadline
        self._max_bytes = max_bytes
        self._on_lost = on_lost
        self._on_late = on_late
        self._changed = runtime.condition()
        self._open: dict[ChunkKey, Write] = {}
        self._bytes = 0
        self._moved_at = -math.inf
        """Last time at which a write returned from the backend or the queue was empty."""

    @property
    def stuck(self) -> bool:
        """No thread is free of overdue calls: nothing would be written now."""
        self._expire()
        return self.workers.stuck

    @property
    def waiting_bytes(self) -> int:
        """Bytes of chunks accepted and not written yet."""
        return self._bytes

    def pending(self, key: ChunkKey) -> bool:
        return key in self._open

    def has_room(self, nbytes: int) -> bool:
        """Return whether a chunk would be accepted without waiting."""
        return not self._open or self._bytes + nbytes <= self._max_bytes

    def submit(
        self, key: ChunkKey, store: Callable[[], bool], loaded: Loaded, *, until: float, accepted: Callable[[], None],
        record: RequestTrace = NO_TRACE, wanted: Callable[[], bool] | None = None,
    ) -> Write | None:  # fmt: skip
        """Queue a write, waiting for room until `until`; None (the chunk released) if there was none.

        Room is waited for only while writes return: once none has for `HURRIED_SHARE` of the deadline, nobody waits.
        A write of the same key that is under way stands for this one. accepted: called before the write can begin, and
        only if no other stands for it: that one may have done already what it does to the ledger. wanted: called on the
        thread, before the write counts as accepted; if it says no, the write is done. It has a bound of its own.
        """
        write = Write(key, loaded, record=record)
        record.hold()
        same = self._admit(write, until, accepted if wanted is None else lambda: None)
        if same is not write:
            record.release()
            loaded.release()
            return same
        try:
            write.call = self.workers.submit(lambda: self._run(write, store, wanted, accepted), seconds=self._deadline)
        except BackendError:
            self._settle(write, False)
            loaded.release()
            return None
        return write

    def _admit(self, write: Write, until: float, accepted: Callable[[], None]) -> Write | None:
        """The write that is now under way under this key, or None if there was no room by `until`."""
        while True:
            self._expire()
            with self._changed:
                same = self._open.get(write.key)
                if same is not None:
                    return same
                if self.has_room(write.loaded.chunk.nbytes):
                    accepted()
                    if not self._open:
                        self._moved_at = self._runtime.now()
                    self._open[write.key] = write
                    self._bytes += write.loaded.chunk.nbytes
                    return write
                left = min(until, self._moved_at + HURRIED_SHARE * self._deadline) - self._runtime.now()
                if left <= 0 or self.workers.stuck:
                    return None
                self._changed.wait(min(left, 0.1))

    def wait(self, write: Write, until: float) -> bool:
        """Return whether the write was stored by `until`."""
        while write.outcome is None and self._runtime.now() < until:
            self._expire()
            with self._changed:
                if write.outcome is None:
                    self._changed.wait(max(0.0, min(until - self._runtime.now(), 0.1)))
        return write.outcome is True

    def flush(self, until: float) -> bool:
        """Wait until what was accepted so far is written or has failed; False if `until` came first."""
        accepted = list(self._open.values())
        for write in accepted:
            self.wait(write, until)
        return all(write.outcome is not None for write in accepted)

    def flush_one(self, key: ChunkKey, until: float) -> bool:
        """Wait for the write of `key`, if there is one; False if it failed or `until` came first."""
        write = self._open.get(key)
        return write is None or self.wait(write, until)

    def close(self, until: float) -> None:
        """Write what was accepted until `until`; the rest is lost, and said to be."""
        self.flush(until)
        self._lose(list(self._open.values()), "closed before it was written")
        self.workers.close(max(0.0, until - self._runtime.now()))

    def _run(
        self, write: Write, store: Callable[[], bool], wanted: Callable[[], bool] | None, accepted: Callable[[], None]
    ) -> None:
        outcome = False
        try:
            if wanted is not None and not wanted():
                outcome = True
            elif self._begin(write, accepted if wanted is not None else lambda: None):
                outcome = store()
        except Exception as error:
            if write.outcome is None:
                self._on_lost(write, f"write failed: {type(error).__name__}")
        finally:
            write.loaded.release()
            self._moved_at = self._runtime.now()
            self._settle(write, outcome)

    def _begin(self, write: Write, accepted: Callable[[], None]) -> bool:
        """Return whether it begins: not if it was given up. Whoever gives it up afterwards finds it accepted."""
        with self._changed:
            if write.outcome is not None:
                return False
            accepted()
            write.began = self._runtime.now()
            return True

    def _settle(self, write: Write, outcome: bool) -> None:
        with self._changed:
            if write.outcome is not None:
                return
            write.outcome = outcome
            del self._open[write.key]
            self._bytes -= write.loaded.chunk.nbytes
            self._changed.notify_all()
        write.record.release()

    def _expire(self) -> None:
        if not self._open:
            return
        now = self._runtime.now()
        late = now - self._deadline
        still = self._moved_at < late  # with fewer threads than there should be, what hangs may hold all there are
        overdue = [
            w
            for w in list(self._open.values())
            if (w.began is not None and w.began < late) or (still and w.call is not None and w.call.overdue_at < now)
        ]
        if overdue:
            self._lose(overdue, "deadline")
            self._on_late()
        if self.workers.stuck:
            self._lose(list(self._open.values()), "every thread is held by an overdue write")

    def _lose(self, writes: list[Write], reason: str) -> None:
        for write in writes:
            if write.outcome is not None:
                continue
            if write.call is not None and write.call.cancel():
                write.loaded.release()  # it never began; one that did keeps its memory until it returns
            self._settle(write, False)
            self._on_lost(write, reason)
