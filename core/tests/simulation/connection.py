"""A process's connection to a simulated store.

Every write to memory that the core lent, and every read of it, is checked: a call that was given up long ago must
still find the memory its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from kvloom import Buffers, Entry, ReadDone, Sink, WriteDone
from simulation.fibers import EPOCH, Process, Violation
from simulation.store import Blob, Pane, Put, SimFault, SimStore


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
        put = Put(self.process, key, data)
        store.puts.append(put)
        try:
            yield
            store.take_time()
            if b"".join(blob) != data and not store.has_decayed():
                store.scheduler.stop(Violation("memory reused", f"{key} changed in memory while it was being written"))
        finally:
            if put in store.puts:
                store.puts.remove(put)
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
