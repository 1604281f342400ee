"""Capacity of a buffer that several processes fill: every put is reserved first.

A writer stores a reservation, then adds up all reservations and, after that, all entries. Of two concurrent writers,
the one that looks last sees the other's reservation, so the sum never exceeds the capacity. If both see each other and
give way, they retry after different times.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator

from kvloom import DeadlineExceeded, StorageBackend

_BLOCK_BYTES = 4096

Wait = Callable[[float], float | None]
"""Waits a while longer than the argument says; how long it was, or None if there is no more time."""


class Until:
    """Until when a call may wait, by the monotonic clock; another thread may end that."""

    __slots__ = ("at",)

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    def left(self) -> float:
        return self.at - time.monotonic()

    def end(self) -> None:
        self.at = -math.inf


def new_id() -> str:
    """48 hex digits that are unique, in the order of time by this machine's clock."""
    return f"{time.time_ns():016x}{os.urandom(16).hex()}"


def age_seconds(id: str) -> float:
    """Seconds between now and when `new_id` made `id`; infinite for what is none. Clocks differ: it may be later."""
    try:
        return abs(time.time_ns() - int(id[:16], 16)) / 1e9
    except ValueError:
        return math.inf


class Room:
    """kept: the prefix of the keys that count against `capacity` (bytes)."""

    def __init__(self, backend: StorageBackend, name: str, *, kept: str, capacity: int, abandoned: float) -> None:
        self._backend = backend
        self._prefix = f"{name}/room/"
        self._kept = kept
        self._capacity = capacity
        self._abandoned = abandoned
        self._turn = threading.Lock()

    @contextlib.contextmanager
    def reserved(self, nbytes: int, *, replacing: str, wait: Wait, until: Until) -> Iterator[None]:
        """Room for `nbytes`, in which the key `replacing` may be put within.

        Raises ValueError if there can never be, DeadlineExceeded if there was none in time.
        """
        needed = -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES
        if needed > self._capacity:
            raise ValueError(f"{needed} bytes do not fit into a capacity of {self._capacity}; make capacity larger")
        if not self._turn.acquire(timeout=max(0.0, until.left())):
            raise DeadlineExceeded(self._full(needed))
        try:
            mine = self._reserve(needed, replacing, wait)
        finally:
            self._turn.release()
        try:
            yield
        finally:
            self._give_back(mine)

    def _reserve(self, needed: int, replacing: str, wait: Wait) -> str:
        pause: float | None = 0.0
        while pause is not None:
            # Looking first saves writing a reservation that would not do.
            if self._used(replacing) + needed <= self._capacity:
                mine = f"{self._prefix}{new_id()}-{needed}"
                self._backend.put(mine, [b"reserved"])
                try:
                    fits = self._used(replacing) <= self._capacity
                except BaseException:
                    self._give_back(mine)
                    raise
                if fits:
                    return mine
                self._give_back(mine)
            pause = wait(pause)
        raise DeadlineExceeded(self._full(needed))

    def _used(self, replacing: str) -> int:
        """Bytes reserved and stored. Reservations are listed first: an entry put meanwhile then counts as stored."""
        total = 0
        for entry in list(self._backend.scan(self._prefix)):
            id, _, nbytes = entry.key.removeprefix(self._prefix).rpartition("-")
            if age_seconds(id) > self._abandoned:
                self._give_back(entry.key)
            elif nbytes.isdigit():
                total += int(nbytes)
        return total + sum(entry.bytes for entry in self._backend.scan(self._kept) if entry.key != replacing)

    def _give_back(self, mine: str) -> None:
        with contextlib.suppress(Exception):  # else it counts until it is old
            self._backend.delete(mine)

    def _full(self, needed: int) -> str:
        return f"no room for {needed} bytes in a buffer of {self._capacity}: nobody took enough in time"
