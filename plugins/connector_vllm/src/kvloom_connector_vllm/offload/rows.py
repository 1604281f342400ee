"""Rows of the host memory of an engine, to and from tiers, for an engine that can be told that a load failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch

from .tiers import CLOSING_SECONDS, Asking, Found, Pace, Tiers

KEY_BYTES = 32 + 4
"""SHA-256 and the number of a group: hashes of another length may collide."""


@dataclass(frozen=True, slots=True)
class Done:
    """A job that is over: which of its keys were moved, how many bytes, and how long it took."""

    job: int
    keys: tuple[bytes, ...]
    complete: bool
    bytes: int
    seconds: float


class RowStore:
    """Called by the engine's scheduler; nothing waits for a tier, but for `drain` and `close`, and `end_step` for
    milliseconds, if steps follow each other faster than that.

    view: `[rows, row_bytes]`, contiguous, to be written to. patience: seconds that a request waits at most for what the
    tiers say.
    """

    def __init__(
        self, tiers: Tiers, view: memoryview, *, patience: float = 10.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._tiers, self._patience, self._now = tiers, patience, now
        self._rows = [torch.from_numpy(np.frombuffer(view, np.uint8)).view(len(view), -1)]
        self._row_bytes = self._rows[0].shape[1]
        self._lock = threading.Lock()
        self._requests: dict[str, Asking] = {}
        self._questions: list[tuple[Asking, bytes]] = []
        self._done: list[Done] = []
        self._running: set[Future[None]] = set()
        self._pace = Pace(now)
        self._reads = ThreadPoolExecutor(2, "kvloom-offload-read")
        self._writes = ThreadPoolExecutor(1, "kvloom-offload-write")
        self._give_up = float("inf")
        self._closed = False

    def lookup(self, key: bytes, request: str) -> Found:
        """HIT if the tiers say so: the load may still fail."""
        with self._lock:
            if self._closed or len(key) != KEY_BYTES:
                return Found.MISS
            asking = self._requests.setdefault(request, Asking())
            answer = asking.answers.get(key)
            if answer is not None:
                return Found.HIT if answer else Found.MISS
            if asking.waited(self._now()) > self._patience:
                return Found.MISS
            if key not in asking.answers:
                asking.answers[key] = None
                self._questions.append((asking, key))
            return Found.ASKED

    def end_step(self) -> None:
        with self._lock:
            questions, self._questions = self._questions, []
            if questions and not self._closed:
                self._running.add(self._reads.submit(self._ask, questions))
            under_way = set(self._running)
        self._pace(under_way)
        with self._lock:
            self._running -= {one for one in under_way if one.done()}

    def end_request(self, request: str) -> None:
        with self._lock:
            self._requests.pop(request, None)

    def load(self, job: int, keys: Sequence[bytes], rows: Sequence[int], request: str) -> None:
        """Fill rows in the background."""
        self._start(self._reads, job, lambda: self._load(list(keys), list(rows), request), keys)

    def store(self, job: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Keep rows, which do not change until the job is over. They are found a little later."""
        self._start(self._writes, job, lambda: self._store(list(keys), list(rows)), keys)

    def finished(self) -> list[Done]:
        """Jobs that are over and have not been told yet."""
        with self._lock:
            done, self._done = self._done, []
            return done

    def drain(self) -> None:
        """Wait until no row is read or written any more: as long as the tiers' calls may take."""
        with self._lock:
            running = set(self._running)
        wait(running)

    def flush(self, timeout: float = CLOSING_SECONDS) -> bool:
        """Wait until stored chunks are in their tier; False if `timeout` seconds were not enough."""
        self.drain()
        return self._tiers.engine.flush(timeout)

    def close(self) -> None:
        """Write accepted chunks, within half a minute, and release rows and tiers. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._give_up = self._now() + CLOSING_SECONDS
        self._reads.shutdown()  # a cancelled read would never end for a caller in `drain`
        self._writes.shutdown()
        self._tiers.close()
        self._rows = []

    def _start(self, pool: ThreadPoolExecutor, job: int, work: Callable[[], list[bool]], keys: Sequence[bytes]) -> None:
        names = tuple(keys)

        def run() -> None:
            began, moved = self._now(), [False] * len(names)
            try:
                moved = work()
            finally:
                there = tuple(key for key, here in zip(names, moved, strict=True) if here)
                size = len(there) * self._row_bytes
                with self._lock:
                    self._done.append(Done(job, there, all(moved), size, self._now() - began))

        with self._lock:
            if self._closed:
                self._done.append(Done(job, (), not names, 0, 0.0))
                return
            self._running.add(pool.submit(run))

    def _ask(self, questions: Sequence[tuple[Asking, bytes]]) -> None:
        if self._closed:
            return
        found = self._tiers.find([key for _, key in questions])
        with self._lock:
            for (asking, key), here in zip(questions, found, strict=True):
                asking.answers[key] = here

    def _load(self, keys: list[bytes], rows: list[int], request: str) -> list[bool]:
        if self._closed:
            return [False] * len(keys)
        loaded = self._tiers.load(keys, rows=self._rows, slots=rows)
        with self._lock:
            asking = self._requests.get(request)
            if asking is not None:
                asking.answers.update((key, False) for key, here in zip(keys, loaded, strict=True) if not here)
        return loaded

    def _store(self, keys: list[bytes], rows: list[int]) -> list[bool]:
        sure = all(len(key) == KEY_BYTES for key in keys) and self._now() < self._give_up
        return [sure and self._tiers.save(keys, rows=self._rows, slots=rows)] * len(keys)
