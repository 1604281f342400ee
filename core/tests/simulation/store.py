"""Simulated stores: dictionaries that outlive engines, whose calls take virtual time and go wrong as told.

Every write to memory that the core lent, and every read of it, is checked: a call that was given up long ago must
still find the memory its own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from kvloom import Buffers, Entry, ReadDone, Sink, WriteDone
from simulation.fibers import EPOCH, Fiber, Process, Scheduler, Violation


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
class _Put:
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
    _puts: list[_Put] = field(default_factory=list)

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
        for put in [put for put in self._puts if put.process is process]:
            self._puts.remove(put)
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


class Guard:
    """Says whether memory that was lent still belongs to whom it was lent. See `peek.PoolGuard`."""

    def mark(self, view: memoryview) -> int:
        return 0

    def owned(self, view: memoryview, mark: int) -> bool:
        return True


class Client:
    """One process's connection to a store: the methods of a StorageBackend, with the process that calls them."""

    def __init__(self, store: SimStore, process: Process, guard: Callable[[], Guard]) -> None:
        self.store = store
        self.process = process
        self._guard = guard
        self.running: dict[str, int] = {}
        self.most: dict[str, int] = {}

    def _count(self, verb: str, by: int) -> None:
        now = self.running[verb] = self.running.get(verb, 0) + by
        self.most[verb] = max(self.most.get(verb, 0), now)

    def put(self, key: str, blob: Buffers) -> None:
        self._count("put", 1)
        try:
            for _ in self._leaving(key, blob):
                pass
        finally:
            self._count("put", -1)

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        """Two blobs at a time leave side by side; sometimes it breaks off in the middle, and what was on its way
        arrives all the same. What becomes of a blob may be told twice, or never."""
        rng = self.store.rng
        leaving = {number: self._leaving(key, blob) for number, (key, blob) in enumerate(requests)}
        self._count("put", 1)
        try:
            while leaving:
                number = rng.choice(list(leaving)[:2])
                outcome: Exception | None = None
                try:
                    next(leaving[number])
                    continue
                except StopIteration:
                    pass
                except Exception as error:
                    if rng.random() < 0.3:
                        self._land_some([requests[each] for each in leaving if each != number])
                        raise
                    outcome = error
                del leaving[number]
                if not (self.store.fault("fail_after") if outcome is None else rng.random() < 0.3):
                    done(number, outcome)
                    if outcome is not None and rng.random() < 0.3:
                        done(number, None)
        finally:
            for one in leaving.values():
                one.close()
            self._count("put", -1)

    def _land_some(self, requests: Sequence[tuple[str, Buffers]]) -> None:
        for key, blob in requests:
            if self.store.rng.random() < 0.3:
                self.store.land(key, b"".join(blob))

    def _leaving(self, key: str, blob: Buffers) -> Iterator[None]:
        """`put`, in steps."""
        store = self.store
        data = b"".join(blob)
        put = _Put(self.process, key, data)
        store._puts.append(put)
        try:
            yield
            store.take_time()
            if b"".join(blob) != data and not store.has_decayed():
                store.scheduler.stop(Violation("memory reused", f"{key} changed in memory while it was being written"))
        finally:
            if put in store._puts:
                store._puts.remove(put)
        fault = "" if key.startswith("spec/") else store.fault("lose", "late", "twice", "rot", "fail_after")
        if fault == "rot":
            data = store.damaged(data)
        if fault not in ("lose", "late"):
            store.land(key, data)
        if fault in ("late", "twice"):
            store.land_later(key, data)
        if fault == "fail_after":
            raise SimFault(5, "simulated: failed after the write")

    def get(self, key: str) -> bytes | None:
        self._count("get", 1)
        try:
            self.store.take_time()
        finally:
            self._count("get", -1)
        return self._read(key)

    def _read(self, key: str) -> bytes | None:
        store = self.store
        blob = store.blobs.get(key)
        if blob is None:
            return None
        fault = "" if key.startswith("spec/") else store.fault("flip", "rot")
        if not fault:
            return blob.data
        data = store.damaged(blob.data)
        if fault == "rot":
            store.blobs[key] = blob._replace(data=data)
        return data

    def get_into(self, key: str, sink: Sink) -> bool:
        self._count("get", 1)
        try:
            arriving = self._arriving(key, sink)
            while True:
                next(arriving)
        except StopIteration as end:
            return bool(end.value)
        finally:
            self._count("get", -1)

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        """Two blobs at a time arrive side by side; sometimes it breaks off in the middle."""
        rng = self.store.rng
        arriving = {number: self._arriving(key, sink) for number, (key, sink) in enumerate(requests)}
        self._count("get", 1)
        try:
            while arriving:
                number = rng.choice(list(arriving)[:2])
                try:
                    next(arriving[number])
                    continue
                except StopIteration as end:
                    outcome: bool | Exception = bool(end.value)
                except Exception as error:
                    if rng.random() < 0.3:
                        raise
                    outcome = error
                del arriving[number]
                done(number, outcome)
        finally:
            self._count("get", -1)

    def _arriving(self, key: str, sink: Sink) -> Generator[None, None, bool]:
        """`get_into`, in steps."""
        store, rng = self.store, self.store.rng
        store.take_time()
        data = self._read(key)
        if data is None:
            return False
        guard = self._guard()
        view = sink.reserve(len(data))
        mark = guard.mark(view)
        # It arrives in parts, and any of them may take long.
        cuts = [0, *sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(3))), len(data)]
        for start, end in itertools.pairwise(cuts):
            if start:
                yield
                store.take_time()
            if not guard.owned(view, mark):
                store.scheduler.stop(Violation("late write", f"{key} arrived in memory that has a new owner"))
            view[start:end] = data[start:end]
            sink.filled(end)
        return True

    def map(self, key: str, most_bytes: int) -> Pane | None:
        self.store.take_time()
        blob = self.store.blobs.get(key)
        return None if blob is None or len(blob.data) > most_bytes else Pane(self.store, key, blob.data)

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        self.store.take_time()
        data = self._read(key)
        if data is None or offset + len(into) > len(data):
            return False
        into[:] = data[offset : offset + len(into)]
        return True

    def contains_many(self, keys: list[str]) -> list[bool]:
        self.store.take_time()
        return [key in self.store.blobs for key in keys]

    def delete_many(self, keys: list[str]) -> None:
        store = self.store
        store.take_time()
        fault = store.fault("fail_after")
        for at, key in enumerate(keys):
            if fault and at * 2 >= len(keys):
                break
            store.say(f"{store.scheduler.time:.6f} {store.name} deletes {key[33:58]} ({key in store.blobs})")
            store.changes += 1
            store.blobs.pop(key, None)
        if fault:
            raise SimFault(5, "simulated: failed half-way through the deletes")

    def scan(self, prefix: str) -> Iterator[Entry]:
        store = self.store
        store.take_time()
        found = [(key, blob) for key, blob in list(store.blobs.items()) if key.startswith(prefix)]
        if fault := store.fault("partial"):
            store.partial_listings += 1
            found = found[: store.rng.randrange(len(found) + 1)]
        for at, (key, blob) in enumerate(found):
            if at % 8 == 7:
                store.take_time()
            yield _entry(key, blob)
        if fault and store.rng.random() < 0.5:
            raise SimFault(5, "simulated: the listing broke off")

    def touch_many(self, keys: Any) -> None:
        self.store.take_time()
        now = EPOCH + self.store.scheduler.time
        for key in keys:
            blob = self.store.blobs.get(key)
            if blob is not None:
                self.store.blobs[key] = blob._replace(used=now)

    def hold(self, name: str) -> bool:
        self.store.take_time()
        holder = self.store.holders.get(name)
        if holder is None or not holder.alive:
            self.store.holders[name] = holder = self.process
        return holder is self.process

    def close(self) -> None:
        for name in [name for name, holder in self.store.holders.items() if holder is self.process]:
            del self.store.holders[name]
        self.store.take_time()


def _entry(key: str, blob: Blob) -> Entry:
    values = {"key": key, "bytes": blob.space, "modified": blob.modified, "used": blob.used}
    return Entry(**{name: values[name] for name in Entry._fields})
