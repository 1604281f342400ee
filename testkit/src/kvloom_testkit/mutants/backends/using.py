"""Faults that show in long use, at `close`, and in what an instance says of itself."""

from __future__ import annotations

import mmap
import os
import socket
import threading

from kvloom import Buffer, Buffers, Sink
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.backend import DirectoryBackend
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend


class UnmapsWhatItReturned(Mutant, DirectoryBackend):
    """Reads by mapping; `close` fails while a caller holds a blob."""

    breaks = "B07"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._maps: list[mmap.mmap] = []

    def get(self, key: str) -> Buffer | None:
        try:
            with self._file(key).open("rb") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        except FileNotFoundError:
            return None
        return memoryview(self._maps[-1])

    def close(self) -> None:
        while self._maps:
            self._maps.pop().close()


class HoldsAFileAmongBlobs(Mutant, CompleteDirectoryBackend):
    """Its name is the right's, which may be a key."""

    breaks = "B28"

    def hold(self, name: str) -> bool:
        told = super().hold(name)
        (self._path / name).touch()
        return told


class LeavesItsProbe(Mutant, DirectoryBackend):
    """A blob that nobody deletes."""

    breaks = "B30"

    def check_writable(self) -> None:
        self.put("write-test", [b"x"])


class ProbesWithTheNextBestKey(Mutant, DirectoryBackend):
    """Puts a blob where there is one already."""

    breaks = "B30"

    def check_writable(self) -> None:
        for entry in self.scan():
            return self.put(entry.key, [b"x"])


class EmptiesTheStore(Mutant, DirectoryBackend):
    """To see whether it may."""

    breaks = "B30"

    def check_writable(self) -> None:
        self.delete_many([entry.key for entry in self.scan()])


class KeepsTheFileOfAShortRange(Mutant, CompleteDirectoryBackend):
    """Returns from a short range before it closes the file."""

    breaks = "B39"

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        if not self.contains(key):
            return False
        number = os.open(self._file(key), os.O_RDONLY)
        if os.fstat(number).st_size < offset + len(into):
            return False
        os.preadv(number, [into], offset)
        os.close(number)
        return True


class KeepsTheFileOfARefusal(Mutant, CompleteDirectoryBackend):
    """An error raised by `reserve` skips its `close`."""

    breaks = "B31"

    def get_into(self, key: str, sink: Sink) -> bool:
        if not self.contains(key):
            return False
        number = os.open(self._file(key), os.O_RDONLY)
        memory = sink.reserve(os.fstat(number).st_size)
        os.preadv(number, [memory], 0)
        os.close(number)
        sink.filled(len(memory))
        return True


class ConnectsEveryThread(Mutant, DirectoryBackend):
    """Keeps a connection for each thread until `close`."""

    breaks = "B39"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._connections: dict[threading.Thread, int] = {}

    def get(self, key: str) -> Buffer | None:
        if threading.current_thread() not in self._connections:
            self._connections[threading.current_thread()] = os.open(self._path, os.O_RDONLY)
        return super().get(key)

    def close(self) -> None:
        while self._connections:
            os.close(self._connections.popitem()[1])


class WantsNoThreads(Mutant, DirectoryBackend):
    """One read at a time is meant."""

    breaks = "B40"
    threads = 0


class SaysNoInWords(Mutant, DirectoryBackend):
    """Returns a word, which is true, where False is meant."""

    breaks = "B40"
    shared = "no"  # type: ignore[assignment]


class ClosesOnItsThread(Mutant, DirectoryBackend):
    """Like connections that belong to the thread that made them."""

    breaks = "B25"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._thread = threading.get_ident()

    def close(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("closed in another thread than it was made in")


class SaysGoodbyeForItsParent(Mutant, DirectoryBackend):
    """A forked child shares the connection, and ends it for both."""

    breaks = "B23"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._ours, self._theirs = socket.socketpair()
        self._closed = False

    def put(self, key: str, blob: Buffers) -> None:
        self._ours.send(b"put")
        self._theirs.recv(3)
        super().put(key, blob)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._ours.shutdown(socket.SHUT_RDWR)
            self._ours.close()
            self._theirs.close()


class KeepsItsLockWhenAPutFails(Mutant, DirectoryBackend):
    """Releases its lock on the last line, and not in a `finally`."""

    breaks = "B12"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._lock = threading.RLock()

    def put(self, key: str, blob: Buffers) -> None:
        self._lock.acquire()
        super().put(key, blob)
        self._lock.release()


class KeepsItsLockWhenRefused(Mutant, DirectoryBackend):
    """An error raised by `reserve` skips the release."""

    breaks = "B13"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        self._lock = threading.RLock()

    def get_into(self, key: str, sink: Sink) -> bool:
        self._lock.acquire()
        found = super().get_into(key, sink)
        self._lock.release()
        return found

    def put(self, key: str, blob: Buffers) -> None:
        with self._lock:
            super().put(key, blob)
