"""The write queue of a stored tier: bounded, in the background, and never a reason for the caller to be stuck."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvloom.errors import BackendError
from kvloom.memory import Lease
from kvloom.runtime import Call, Runtime, Workers
from kvloom.types import Chunk

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Write:
    """One accepted write."""

    name: str
    chunk: Chunk
    lease: Lease
    began: float | None = None
    outcome: bool | None = None
    """True: stored. False: failed or dropped. None: still under way."""
    call: Call[None] | None = field(default=None, repr=False)


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
        on_lost: Callable[[Chunk, str], None],
    ) -> None:
        self.workers = workers
        self._runtime = runtime
        self._deadline = deadline
        self._max_bytes = max_bytes
        self._on_lost = on_lost
        self._changed = runtime.condition()
        self._open: dict[str, Write] = {}
        self._bytes = 0

    @property
    def stuck(self) -> bool:
        """No thread is free of overdue calls: nothing would be written now."""
        self._expire()
        return self.workers.stuck

    def pending(self, name: str) -> bool:
        return name in self._open

    def submit(self, name: str, store: Callable[[], bool], lease: Lease, chunk: Chunk, *, until: float) -> Write | None:
        """Queue a write, waiting for room until `until`; None (the lease released) if there was none.

        A write of the same name that is under way stands for this one.
        """
        write = Write(name, chunk, lease)
        same = self._admit(write, until)
        if same is not write:
            lease.release()
            return same
        try:
            write.call = self.workers.submit(lambda: self._run(write, store), seconds=self._deadline)
        except BackendError:
            self._settle(write, False)
            lease.release()
            return None
        return write

    def _admit(self, write: Write, until: float) -> Write | None:
        """The write that is now under way under this name, or None if there was no room by `until`."""
        while True:
            self._expire()
            with self._changed:
                same = self._open.get(write.name)
                if same is not None:
                    return same
                if not self._open or self._bytes + write.chunk.nbytes <= self._max_bytes:
                    self._open[write.name] = write
                    self._bytes += write.chunk.nbytes
                    return write
                left = until - self._runtime.now()
                if left <= 0 or self.workers.stuck:
                    return None
                self._changed.wait(min(left, 0.1))

    def wait(self, write: Write, until: float) -> bool:
        """Whether the write was stored by `until`."""
        while write.outcome is None and self._runtime.now() < until:
            self._expire()
            with self._changed:
                if write.outcome is None:
                    self._changed.wait(max(0.0, min(until - self._runtime.now(), 0.1)))
        return write.outcome is True

    def flush(self, until: float) -> bool:
        """Wait until nothing is under way; False if `until` came first."""
        for write in list(self._open.values()):
            self.wait(write, until)
        return not self._open

    def flush_one(self, name: str, until: float) -> bool:
        """Wait for the write of `name`, if there is one; False if it failed or `until` came first."""
        write = self._open.get(name)
        return write is None or self.wait(write, until)

    def close(self, until: float) -> None:
        """Write what was accepted until `until`; the rest is lost, and said to be."""
        self.flush(until)
        self._lose(list(self._open.values()), "closed before it was written")
        self.workers.close(max(0.0, until - self._runtime.now()))

    def _run(self, write: Write, store: Callable[[], bool]) -> None:
        write.began = self._runtime.now()
        outcome = False
        try:
            outcome = store()
        except Exception as error:
            log.warning("%s: a write failed: %s: %s", self.workers.name, type(error).__name__, str(error))
            if write.outcome is None:
                self._on_lost(write.chunk, f"write failed: {type(error).__name__}")
        finally:
            write.lease.release()
            self._settle(write, outcome)

    def _settle(self, write: Write, outcome: bool) -> None:
        with self._changed:
            if write.outcome is None:
                write.outcome = outcome
                del self._open[write.name]
                self._bytes -= write.chunk.nbytes
                self._changed.notify_all()

    def _expire(self) -> None:
        if not self._open:
            return
        late = self._runtime.now() - self._deadline
        overdue = [w for w in list(self._open.values()) if w.began is not None and w.began < late]
        if overdue:
            self._lose(overdue, "deadline")
        if self.workers.stuck:
            self._lose(list(self._open.values()), "every thread is held by an overdue write")

    def _lose(self, writes: list[Write], reason: str) -> None:
        for write in writes:
            if write.outcome is not None:
                continue
            if write.call is not None and write.call.cancel():
                write.lease.release()  # it never began; one that did keeps its memory until it returns
            self._settle(write, False)
            self._on_lost(write.chunk, reason)
