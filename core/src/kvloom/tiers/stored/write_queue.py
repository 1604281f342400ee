"""The write queue of a stored tier: bounded, in the background, and never a reason for the caller to be stuck."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvloom.errors import BackendError
from kvloom.format.envelope import ALIGN_BYTES
from kvloom.memory import pages_of
from kvloom.runtime import Batch, Call, Runtime, Workers
from kvloom.telemetry.request_trace import NO_TRACE, RequestTrace
from kvloom.tiers.chain import NO_CHAIN, Chain
from kvloom.tiers.request_context import HURRIED_SHARE
from kvloom.tiers.stored.existence import Inquiry
from kvloom.tiers.tier import Loaded
from kvloom.types import ChunkKey

LEAST_BATCH_BYTES = 1 << 20
MOST_BATCH_BYTES = 8 << 20
"""Bytes of chunks that one call writes, if so many wait: enough for one round trip, and soon done."""


@dataclass(eq=False, slots=True)
class Write:
    """A chunk to be written, whose lease the queue takes over."""

    key: ChunkKey
    loaded: Loaded
    since: int = 0
    """A mark of the removals from before the chunk was got; what was removed after it is not kept."""
    chain: Chain = NO_CHAIN
    """The chunks that it is part of; none of them makes room for what is behind it."""
    record: RequestTrace = field(default=NO_TRACE, repr=False)
    """Held until there is an outcome."""
    inquiry: Inquiry | None = field(default=None, repr=False)
    """It is written only if the store turns out not to have enough of it."""
    begun: bool = False
    """It is being written, and its deadline counts."""
    outcome: bool | None = None
    """True: stored, or not needed. False: failed or dropped. None: still under way."""
    call: Call[None] | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        return self.loaded.chunk.nbytes

    @property
    def space(self) -> int:
        """Bytes of its blob in the store, about: a header, and the chunk as it is."""
        return pages_of(self.nbytes) + ALIGN_BYTES


WriteTold = Callable[[int, str], None]
"""Told of each write of a batch, once: its number, and why it is lost; empty if it is stored."""


class WriteQueue:
    """At most `max_bytes` of chunks wait or are being written; a write past its deadline is given up.

    A write keeps its lease until its outcome is known, or the backend's call returns, so that memory under a call that
    hangs is never reused. Deadlines are looked after whenever somebody submits or waits; nothing ticks. Each write has
    a call of its own; the thread that begins one takes over those behind it, and writes them together.
    """

    def __init__(
        self,
        workers: Workers,
        runtime: Runtime,
        *,
        deadline: float,
        max_bytes: int,
        store: Callable[[Sequence[Write], WriteTold], object],
        on_accepted: Callable[[Write], None],
        on_lost: Callable[[Write, str], None],
        on_late: Callable[[], None],
        batch_bytes: int = 0,
    ) -> None:
        """store: called on a thread with the writes of one batch. on_accepted: told before a write begins, once it is
        known to be wanted: on submission if there is no inquiry. on_lost: told of everything that is not written, and
        why. on_late: told when a call was overdue. batch_bytes: most bytes that are written together; if less than two
        chunks, they are written one by one.
        """
        self.workers = workers
        self._runtime = runtime
        self._deadline = deadline
        self._max_bytes = max_bytes
        self._batch_bytes = batch_bytes
        self._store = store
        self._on_accepted = on_accepted
        self._on_lost = on_lost
        self._on_late = on_late
        self._changed = runtime.condition()
        self._open: dict[ChunkKey, Write] = {}
        """In the order in which they were accepted."""
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

    def submit(self, write: Write, *, until: float) -> Write | None:
        """Queue a write, waiting for room until `until`; None (the chunk released) if there was none.

        Room is waited for only while writes return: once none has for `HURRIED_SHARE` of the deadline, nobody waits.
        A write of the same key that is under way stands for this one: it is returned, and this one never accepted.
        """
        write.record.hold()
        same = self._admit(write, until)
        if same is not write:
            write.record.release()
            write.loaded.release()
            return same
        try:
            write.call = self.workers.submit_batch(partial(self._run, write), 1, seconds=self._deadline)[0]
        except BackendError:
            self._settle(write, False)
            write.loaded.release()
            return None
        return write

    def _admit(self, write: Write, until: float) -> Write | None:
        """The write that is now under way under this key, or None if there was no room by `until`."""
        while True:
            self._expire()
            with self._changed:
                same = self._open.get(write.key)
                if same is not None:
                    return same
                if self.has_room(write.nbytes):
                    if write.inquiry is None:
                        self._on_accepted(write)
                    if not self._open:
                        self._moved_at = self._runtime.now()
                    self._open[write.key] = write
                    self._bytes += write.nbytes
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

    def _run(self, first: Write, batch: Batch[None]) -> None:
        """On a thread: write the first, and others that wait behind it."""
        taken, unsaid = [first], {0}  # by their numbers in the batch

        def told(number: int, lost: str) -> None:
            write = taken[number]
            unsaid.discard(number)
            if lost and write.outcome is None:
                self._on_lost(write, lost)
            write.loaded.release()
            self._moved_at = self._runtime.now()
            self._settle(write, not lost)
            batch.give(number, None)

        def begins(number: int) -> bool:
            lost = ""
            try:
                if self._begin(taken[number], batch):
                    return True
            except Exception as error:
                lost = f"write failed: {type(error).__name__}"
            told(number, lost)
            return False

        why = "write failed"
        try:
            if not begins(0):
                return
            begun = [0]
            for write in self._behind(first):
                number = None if write.call is None else batch.absorb(write.call)
                if number is not None:
                    taken.append(write)
                    unsaid.add(number)
                    if begins(number):
                        begun.append(number)
            self._store([taken[number] for number in begun], lambda place, lost: told(begun[place], lost))
        except Exception as error:
            why += f": {type(error).__name__}"
        finally:
            for number in sorted(unsaid):
                told(number, why)

    def _behind(self, first: Write) -> list[Write]:
        """Writes that wait, to be written with `first`: so many that every thread has some, unless all are few."""
        share = self._bytes // self.workers.threads
        most = min(self._batch_bytes, max(LEAST_BATCH_BYTES, share)) - first.space
        found: list[Write] = []
        with self._changed:
            for write in self._open.values():
                if write.begun or write is first:
                    continue
                most -= write.space
                if most < 0 or (write.inquiry is not None and not write.inquiry.done):
                    break
                found.append(write)
        return found

    def _begin(self, write: Write, batch: Batch[None]) -> bool:
        """Return whether it is to be written: not if it was given up, or the store has enough of it. That is waited
        for, which has a bound of its own. Whoever gives it up afterwards finds it accepted."""
        if write.inquiry is not None and write.inquiry.enough(write.key):
            self._settle(write, True)
            return False
        with self._changed:
            if write.outcome is not None:
                return False
            if write.inquiry is not None:
                self._on_accepted(write)
            batch.progress()
            write.begun = True
            return True

    def _settle(self, write: Write, outcome: bool) -> None:
        with self._changed:
            if write.outcome is not None:
                return
            write.outcome = outcome
            del self._open[write.key]
            self._bytes -= write.nbytes
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
            if w.call is not None and w.call.overdue_at < now and (w.begun or still)
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
