"""Simulated stores: dictionaries that outlive engines, whose calls take virtual time and go wrong as told."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from simulation.fibers import EPOCH, Fiber, Process, Scheduler


class SimFault(OSError):
    """An error of a simulated store, so that the oracle can tell it from a mistake of the core."""


@dataclass(frozen=True)
class Faults:
    """Probabilities of failures, and durations of calls."""

    latency_seconds: float = 3e-4
    slow: float = 0.0
    """The call takes about as long as the deadline."""
    slow_seconds: float = 0.5
    fail: float = 0.0
    fail_after: float = 0.0
    """It fails, yet what it was asked for was done."""
    hang: float = 0.0
    """It hangs for a multiple of the deadline, then goes on."""
    hang_for_good: float = 0.0
    """It hangs until faults stop."""
    flip: float = 0.0
    """One read gives wrong bytes."""
    rot: float = 0.0
    """The blob is wrong from now on."""
    decay: float = 0.0
    """Memory that is being read becomes wrong."""
    lose: float = 0.0
    """A write is said to be done, and is not."""
    late: float = 0.0
    """A write is said to be done, and is later."""
    twice: float = 0.0
    """A write is done, and done once more later."""
    partial: float = 0.0
    """A listing leaves entries out, or breaks off."""

    @property
    def honest(self) -> bool:
        """Nothing ever goes wrong, though calls take time."""
        return not any(getattr(self, one.name) for one in fields(self) if not one.name.endswith("_seconds"))


class Blob(NamedTuple):
    data: bytes
    modified: float
    used: float

    @property
    def space(self) -> int:
        """Space of the blob in whole pages, as in a file system."""
        return -(-len(self.data) // 4096) * 4096


@dataclass(eq=False)
class Put:
    """A blob on its way."""

    process: Process
    key: str
    data: bytes


@dataclass(eq=False)
class SimStore:
    """A store that one or several backends share."""

    name: str
    scheduler: Scheduler
    rng: random.Random
    faults: Faults
    limit_bytes: int | None = None
    """It evicts by itself beyond this."""
    on_stray: Callable[[str], None] = lambda key: None
    """A blob came to be that no client of the core can be blamed for."""
    say: Callable[[str], None] = lambda line: None
    on_damage: Callable[[], None] = lambda: None
    """Memory has changed that somebody may have been copying into an engine's KV."""
    has_decayed: Callable[[], bool] = lambda: False
    """Returns True once the memory of any store has changed."""
    blobs: dict[str, Blob] = field(default_factory=dict)
    holders: dict[str, Process] = field(default_factory=dict)
    faulty: bool = True
    injected: int = 0
    """Number of injected faults."""
    partial_listings: int = 0
    panes: list[Pane] = field(default_factory=list)
    """Blobs that processes have mapped."""
    frozen: bool = False
    changes: int = 0
    """Number of times that a blob was added or removed."""
    _waiting: list[Fiber] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)

    @property
    def honest(self) -> bool:
        """Nothing went wrong here so far."""
        return self.injected == 0

    @property
    def chunk_blobs(self) -> dict[str, Blob]:
        return {key: blob for key, blob in self.blobs.items() if not key.startswith("spec/")}

    # -- what the world does to it -------------------------------------------------------------------------------------

    def freeze(self) -> None:
        self.frozen = True
        self.injected += 1

    def thaw(self) -> None:
        """Whoever hangs goes on."""
        self.frozen = False
        waiting, self._waiting = self._waiting, []
        for fiber in waiting:
            self.scheduler.wake(fiber)

    def heal(self) -> None:
        """From now on nothing goes wrong, and whoever hangs goes on."""
        self.faulty = False
        self.thaw()

    def crash(self, process: Process) -> None:
        """A process died: what it was writing arrives or does not."""
        for put in [put for put in self.puts if put.process is process]:
            self.puts.remove(put)
            if self.rng.random() < 0.5:
                self.land(put.key, put.data)
            self.on_stray(put.key)

    # -- what backends do with it --------------------------------------------------------------------------------------

    def fault(self, *names: str) -> str:
        """The fault that this call has, of the given ones; empty if none."""
        if not self.faulty:
            return ""
        roll = self.rng.random()
        for name in names:
            roll -= getattr(self.faults, name)
            if roll < 0:
                self.injected += 1
                return name
        return ""

    def take_time(self) -> None:
        """The latency of one round trip, and whatever holds it up. Raises SimFault."""
        seconds = self.rng.expovariate(1 / self.faults.latency_seconds)
        fault = self.fault("slow", "hang", "hang_for_good", "fail")
        if fault == "slow":
            seconds += self.faults.slow_seconds * self.rng.uniform(0.3, 1.3)
        elif fault == "hang":
            seconds += self.faults.slow_seconds * self.rng.uniform(1.0, 6.0)
        self.scheduler.park(self.scheduler.time + seconds, f"store {self.name}")
        if fault == "fail":
            raise SimFault(5, "simulated: input/output error")
        while self.faulty and (self.frozen or fault == "hang_for_good"):
            self._waiting.append(self.scheduler.current)
            self.scheduler.park(float("inf"), f"store {self.name}, which hangs")
            if not self.frozen and self.rng.random() < 0.3:
                raise SimFault(110, "simulated: connection timed out")

    def land(self, key: str, data: bytes) -> None:
        now = EPOCH + self.scheduler.time
        self.say(f"{self.scheduler.time:.6f} {self.name} now has {key[33:58]}")
        self.changes += 1
        self.blobs.pop(key, None)
        self.blobs[key] = Blob(data, now, now)
        while self.limit_bytes is not None and sum(len(b.data) for b in self.blobs.values()) > self.limit_bytes:
            del self.blobs[self.rng.choice(list(self.blobs))]

    def land_later(self, key: str, data: bytes) -> None:
        def later() -> None:
            seconds = self.rng.expovariate(1 / (2 * self.faults.slow_seconds))
            self.scheduler.park(self.scheduler.time + seconds, "a late write")
            if self.faulty:
                self.land(key, data)
                self.on_stray(key)

        self.on_stray(key)
        self.scheduler.spawn(Process(f"store {self.name}"), later, "late write")

    def damaged(self, data: bytes) -> bytes:
        """Wrong bytes instead of `data`."""
        kind = self.rng.randrange(5)
        if not data:
            return b"?"
        if kind == 0:
            return data[: self.rng.randrange(len(data))]
        if kind == 1:
            return data + bytes(self.rng.randrange(1, 5000))
        others = [blob.data for blob in self.blobs.values() if blob.data != data]
        if kind == 2 and others:
            return self.rng.choice(others)
        # The header has zeros that nothing depends on, but its checksum covers them too.
        at = self.rng.randrange(len(data)) if kind == 3 else self.rng.randrange(max(0, len(data) - 200), len(data))
        return data[:at] + bytes([data[at] ^ (1 << self.rng.randrange(8))]) + data[at + 1 :]


class Pane:
    """A mapped blob: the memory that all who have mapped it share, and what of it is this one's own."""

    def __init__(self, store: SimStore, key: str, data: bytes) -> None:
        self.view = memoryview(bytearray(data))
        self._store, self._key, self._data = store, key, data
        store.panes.append(self)

    def current(self) -> bool:
        store, blob = self._store, self._store.blobs.get(self._key)
        here = blob is not None and blob.data is self._data
        if here and store.faulty and store.rng.random() < store.faults.decay:
            store.injected += 1
            store.scheduler.spawn(Process(f"store {store.name}"), self._rot, "rot")
        return here

    def _rot(self) -> None:
        """The blob is wrong from now on, for all who have mapped it, too."""
        store, blob = self._store, self._store.blobs.get(self._key)
        if blob is None or blob.data is not self._data or self not in store.panes:
            return
        at = store.rng.randrange(len(self._data))
        for pane in store.panes:
            if pane._data is self._data:
                pane.view[at] ^= 1
        store.blobs[self._key] = blob._replace(data=bytes(self.view))
        store.on_damage()

    def gone(self) -> bool:
        blob = self._store.blobs.get(self._key)
        return blob is None or blob.data is not self._data

    def close(self) -> None:
        self._store.panes.remove(self)
        self.view[:] = b"\xdb" * len(self.view)
