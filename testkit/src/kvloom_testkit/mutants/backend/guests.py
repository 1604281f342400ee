"""Faults of guests: what belongs to the whole process is another after them."""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Sequence

from kvloom import Buffer, Buffers
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.backend import DirectoryBackend


class LogsEverything(Mutant, DirectoryBackend):
    """As a script may."""

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
    """Its client has no way to set its own, and it is only set when many blobs are asked for."""

    breaks = "B42"

    def get_many(self, keys: Sequence[str]) -> list[Buffer | None]:
        socket.setdefaulttimeout(5)
        return super().get_many(keys)


class HidesItsFiles(Mutant, DirectoryBackend):
    """From everybody but its user, and all other files of the process too."""

    breaks = "B42"

    def check_writable(self) -> None:
        os.umask(0o077)
        super().check_writable()
