"""Faults that show when instances come and go, in one process or in several."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import threading
import zlib
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kvloom import Buffer, Buffers
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.backend import DirectoryBackend
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend


class KeepsBlobsInADictionary(Mutant, DirectoryBackend):
    """Claims to be persistent, and is not."""

    breaks = "B21"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._blobs: dict[str, bytes] = {}

    def put(self, key: str, blob: Buffers) -> None:
        self._blobs[key] = b"".join(blob)

    def get(self, key: str) -> Buffer | None:
        return self._blobs.get(key)


class RemembersWhatIsNotThere(Mutant, DirectoryBackend):
    """Remembers misses, though another instance may put the blob."""

    breaks = "B22"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._absent: set[str] = set()

    def put(self, key: str, blob: Buffers) -> None:
        self._absent.discard(key)
        super().put(key, blob)

    def get(self, key: str) -> Buffer | None:
        blob = None if key in self._absent else super().get(key)
        if blob is None:
            self._absent.add(key)
        return blob


class RemembersWhatItRead(Mutant, DirectoryBackend):
    """Remembers blobs, though another instance may replace or delete them."""

    breaks = "B22"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._read: dict[str, Buffer | None] = {}

    def put(self, key: str, blob: Buffers) -> None:
        self._read.pop(key, None)
        super().put(key, blob)

    def get(self, key: str) -> Buffer | None:
        if self._read.get(key) is None:
            self._read[key] = super().get(key)
        return self._read[key]


class HasAWorkerFromTheStart(Mutant, DirectoryBackend):
    """Starts a worker when it is opened; a forked child inherits its queue without the thread."""

    breaks = "B23"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, key: str, blob: Buffers) -> None:
        done: Future[None] = Future()
        self._jobs.put((partial(super().put, key, blob), done))
        done.result(timeout=1)

    def close(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while job := self._jobs.get():
            job[1].set_result(job[0]())


class HashNamesTheFile(Mutant, DirectoryBackend):
    """The hash differs in every process."""

    breaks = "B24"

    def _file(self, key: str) -> Path:
        return super()._file(f"{key}.{hash(key):x}")


class ClosesOnce(Mutant, DirectoryBackend):
    """Raises at the second `close`."""

    breaks = "B25"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._directory = os.open(self._path, os.O_RDONLY)

    def close(self) -> None:
        os.close(self._directory)
        del self._directory


class ClosesWhatItNeverOpened(Mutant, DirectoryBackend):
    """Its connection is made at the first use."""

    breaks = "B25"

    def put(self, key: str, blob: Buffers) -> None:
        self._log = (self._path / "+log").open("ab")
        super().put(key, blob)

    def close(self) -> None:
        self._log.close()


class ClosesEverybodysClient(Mutant, DirectoryBackend):
    """Instances share one."""

    breaks = "B25"
    _clients: ClassVar[dict[Path, list[bool]]] = {}

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._client = self._clients.setdefault(self._path, [])
        self._client[:] = [True]

    def get(self, key: str) -> Buffer | None:
        if not self._client:
            raise RuntimeError("the client is closed")
        return super().get(key)

    def close(self) -> None:
        self._client.clear()


class IsItsOwnStore(Mutant, CompleteDirectoryBackend):
    """Gives each instance another identity."""

    breaks = "B27"

    def identity(self) -> str | None:
        return f"{super().identity()}@{id(self):x}"


class IdentityIsAPath(Mutant, CompleteDirectoryBackend):
    """Returns a path instead of text as its identity."""

    breaks = "B27"

    def identity(self) -> str | None:
        return self._path  # type: ignore[no-any-return]


class LocksForTheProcess(Mutant, CompleteDirectoryBackend):
    """A lock that two instances in one process both have."""

    breaks = "B28"

    def hold(self, name: str) -> bool:
        if name not in self._rights:
            self._rights[name] = os.open(self._path / f"+hold-{name}", os.O_CREAT | os.O_RDWR)
            fcntl.lockf(self._rights[name], fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True


class SaysNoToItself(Mutant, CompleteDirectoryBackend):
    """Asked again, it finds the right taken."""

    breaks = "B28"

    def hold(self, name: str) -> bool:
        return name not in self._rights and super().hold(name)


class NeverGivesARightBack(Mutant, CompleteDirectoryBackend):
    """A file that is there means that somebody has it."""

    breaks = "B28"

    def hold(self, name: str) -> bool:
        if name in self._rights:
            return True
        try:
            self._rights[name] = os.open(self._path / f"+hold-{name}", os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        return True


class TripsOverItsOwnProbe(Mutant, DirectoryBackend):
    """Fails if the probe's file of an earlier check is still there."""

    breaks = "B30"

    def check_writable(self) -> None:
        (self._path / "+probe").touch(exist_ok=False)


class LeavesAThread(Mutant, DirectoryBackend):
    """Nobody tells it to stop."""

    breaks = "B31"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        threading.Thread(target=threading.Event().wait, args=(20,), daemon=True).start()


class LeavesAFileOpen(Mutant, DirectoryBackend):
    """A lock file, or a connection of a thread that has ended."""

    breaks = "B31"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        os.open(self._path, os.O_RDONLY)


class ForgetsEveryNinthPut(Mutant, DirectoryBackend):
    """Loses every ninth put of one key."""

    breaks = "B32"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._puts: dict[str, int] = {}

    def put(self, key: str, blob: Buffers) -> None:
        self._puts[key] = self._puts.get(key, 0) + 1
        if self._puts[key] % 9:
            super().put(key, blob)


class NumbersItsFiles(Mutant, DirectoryBackend):
    """Numbers files by how many there are; after a delete two keys get the same file."""

    breaks = "B32"

    def put(self, key: str, blob: Buffers) -> None:
        index = self._index()
        super().put(index.setdefault(key, str(len(index))), blob)
        super().put("index", [json.dumps(index).encode()])

    def get(self, key: str) -> Buffer | None:
        number = self._index().get(key)
        return None if number is None else super().get(number)

    def contains(self, key: str) -> bool:
        return key in self._index()

    def delete(self, key: str) -> None:
        index = self._index()
        if index.pop(key, None) is not None:
            super().put("index", [json.dumps(index).encode()])

    def _index(self) -> dict[str, str]:
        found: dict[str, str] = json.loads(super().get("index") or b"{}")
        return found


class LosesALayerOfItsTable(Mutant, DirectoryBackend):
    """A delete after a reopening is not seen: what was there before comes back."""

    breaks = "B32"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._mine: set[int] = set()

    def put(self, key: str, blob: Buffers) -> None:
        self._mine.add(zlib.crc32(key.encode()))
        super().put(key, blob)

    def delete(self, key: str) -> None:
        if zlib.crc32(key.encode()) in self._mine:
            super().delete(key)
