"""Faults of guests: what belongs to the whole process is another after them."""

from __future__ import annotations

import locale
import logging
import os
import random
import resource
import signal
import socket
from collections.abc import Sequence

from kvloom import Buffer, Buffers, Sink
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.backend import DirectoryBackend
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend


class LogsEverything(Mutant, DirectoryBackend):
    """Acceptable in a script only."""

    breaks = "B42"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        logging.basicConfig(level=logging.DEBUG, force=True)


class MovesIntoTheStore(Mutant, DirectoryBackend):
    """So that keys are names of files."""

    breaks = "B42"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        os.chdir(self._path)


class SeedsTheNamesOfItsFiles(Mutant, DirectoryBackend):
    """So that each key's are the same every time."""

    breaks = "B42"

    def put(self, key: str, blob: Buffers) -> None:
        random.seed(key)
        super().put(key, blob)


class SetsEverybodysTimeout(Mutant, DirectoryBackend):
    """Sets the default timeout of all sockets, when many blobs are asked for."""

    breaks = "B42"

    def get_many(self, keys: Sequence[str]) -> list[Buffer | None]:
        socket.setdefaulttimeout(5)
        return super().get_many(keys)


class HidesItsFiles(Mutant, DirectoryBackend):
    """Changes the umask of the process, to hide its files from other users."""

    breaks = "B42"

    def check_writable(self) -> None:
        os.umask(0o077)
        super().check_writable()


class HidesWhatItIsWriting(Mutant, DirectoryBackend):
    """And puts the mask back: what another thread makes meanwhile, nobody else can read."""

    breaks = "B42"

    def put(self, key: str, blob: Buffers) -> None:
        before = os.umask(0o077)
        try:
            super().put(key, blob)
        finally:
            os.umask(before)


class VisitsTheStore(Mutant, DirectoryBackend):
    """Changes the working directory for a moment."""

    breaks = "B42"

    def contains(self, key: str) -> bool:
        here = os.getcwd()
        os.chdir(self._path)
        try:
            return os.path.exists(self._file(key).name)
        finally:
            os.chdir(here)


class SpeaksItsOwnLanguage(Mutant, DirectoryBackend):
    """Changes the locale of the process, to write numbers with a decimal point."""

    breaks = "B42"

    def __init__(self, config, spec=None) -> None:
        super().__init__(config, spec)
        locale.setlocale(locale.LC_NUMERIC, "C")


class IsNotInterrupted(Mutant, DirectoryBackend):
    """Blocks a signal on the calling thread, from its first put on."""

    breaks = "B42"

    def put(self, key: str, blob: Buffers) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        super().put(key, blob)


class MayOpenMoreFiles(Mutant, CompleteDirectoryBackend):
    """Changes the limit of open files of the process."""

    breaks = "B42"

    def get_into(self, key: str, sink: Sink) -> bool:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        return super().get_into(key, sink)
