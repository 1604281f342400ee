"""Storage backends that are legal, though not what anybody would expect."""

from __future__ import annotations

import fcntl
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvloom import Buffer, Buffers, Entry, ReadDone, Sink, StorageBackend, WriteDone
from kvloom import Config as BaseConfig
from kvloom_testkit.mutants import Oddity
from kvloom_testkit.reference.backend import DirectoryBackend
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend


class AnswersOddly(Oddity, CompleteDirectoryBackend):
    """Buffers of every sort, listings backwards and from a snapshot, sizes in whole blocks."""

    def get(self, key: str) -> Buffer | None:
        blob = super().get(key)
        return None if blob is None else memoryview(bytearray(blob)) if len(blob) % 2 else bytearray(blob)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        for entry in sorted(super().scan(prefix), reverse=True):
            yield entry._replace(bytes=-(-entry.bytes // 4096) * 4096)


class TakesBatchesBackwards(Oddity, CompleteDirectoryBackend):
    """The last request first, one of two with the same key, and all outcomes at the end."""

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        outcomes: dict[str, Exception | None] = {}
        for key, blob in reversed(requests):
            if key not in outcomes:
                super().put_many([(key, blob)], lambda _, outcome, key=key: outcomes.update({key: outcome}))
        for number, (key, _) in reversed(list(enumerate(requests))):
            done(number, outcomes[key])

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        outcomes: list[bool | Exception] = []
        super().get_many_into(requests[::-1], lambda _, outcome: outcomes.append(outcome))
        for number, outcome in enumerate(reversed(outcomes)):
            done(number, outcome)


class IsSlow(Oddity, DirectoryBackend):
    """Like a store at the other end of a wire."""

    def put(self, key: str, blob: Buffers) -> None:
        time.sleep(0.001)
        super().put(key, blob)

    def get(self, key: str) -> Buffer | None:
        time.sleep(0.001)
        return super().get(key)


class SaysLittle(Oddity, CompleteDirectoryBackend):
    """Does not know when, nor which store it is."""

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return (entry._replace(modified=0.0, used=0.0) for entry in super().scan(prefix))

    def identity(self) -> str | None:
        return None

    def touch_many(self, keys: Sequence[str]) -> None:
        """Cheap enough."""


class OpensOnce(Oddity, DirectoryBackend):
    """A store of one instance at a time."""

    shared = False

    def __init__(self, config: BaseConfig, spec: object = None) -> None:
        super().__init__(config)
        self._lock = (self._path / "+lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise

    def close(self) -> None:
        super().close()
        self._lock.close()


class CannotList(Oddity, CompleteDirectoryBackend):
    """Like a cache that others share, which keeps its own bounds and is asked for every key."""

    bounded = True
    scan = StorageBackend.scan


class TellsTimeInSeconds(Oddity, CompleteDirectoryBackend):
    """Whole ones; and its clock is a minute behind."""

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        for entry in super().scan(prefix):
            yield entry._replace(modified=entry.modified // 1 - 60, used=entry.used // 1 - 60)


class EvictsByItself(Oddity, StorageBackend):
    """In memory, with as much room as the kit asks for."""

    type = "kit_evicting"
    bounded = True
    Config = DirectoryBackend.Config

    def __init__(self, config: BaseConfig, spec: object = None) -> None:
        super().__init__(config)
        self._blobs: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: str, blob: Buffers) -> None:
        data = b"".join(blob)
        with self._lock:
            self._blobs[key] = data
            self._blobs.move_to_end(key)
            while len(self._blobs) > 200 or sum(map(len, self._blobs.values())) > 16 << 20:
                self._blobs.popitem(last=False)

    def get(self, key: str) -> Buffer | None:
        return self._blobs.get(key)

    def contains(self, key: str) -> bool:
        return key in self._blobs

    def delete(self, key: str) -> None:
        with self._lock:
            self._blobs.pop(key, None)
