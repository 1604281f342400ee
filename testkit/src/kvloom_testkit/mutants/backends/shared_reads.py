"""Faults of reads that many threads do at once, or many of which are one call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from kvloom import BackendError, ReadDone, Sink
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend


class BatchReportsOnAnotherThread(Mutant, CompleteDirectoryBackend):
    """The outcomes come from the threads that read."""

    breaks = "B50"

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(super().get_many_into, requests, done).result()


class _Deaf:
    """Does not hear what a sink says of what has arrived."""

    def __init__(self, sink: Sink) -> None:
        self.reserve = sink.reserve
        self._filled = sink.filled

    def filled(self, num_bytes: int) -> None:
        with suppress(BackendError):
            self._filled(num_bytes)


class BatchDoesNotHearOfDamage(Mutant, CompleteDirectoryBackend):
    """Whatever a sink says of the bytes in it, they have arrived."""

    breaks = "B50"

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        super().get_many_into([(key, _Deaf(sink)) for key, sink in requests], done)


class _Scratch(CompleteDirectoryBackend):
    """Reads blobs into memory that all threads share, and copies them from there."""

    def read_by_way_of_scratch(self, key: str, sink: Sink) -> bool:
        blob = super().get(key)
        if blob is None:
            return False
        scratch: bytearray = self.__dict__.setdefault("scratch", bytearray(1 << 20))
        memory = sink.reserve(len(blob))
        scratch[: len(blob)] = blob
        time.sleep(0)
        memory[:] = scratch[: len(blob)]
        sink.filled(len(blob))
        return True


class ReadsShareAScratchBuffer(Mutant, _Scratch):
    """One reader gets what another has just read."""

    breaks = "B56"

    def get_into(self, key: str, sink: Sink) -> bool:
        return self.read_by_way_of_scratch(key, sink)


class BatchesShareAScratchBuffer(Mutant, _Scratch):
    """One batch gets what another has just read."""

    breaks = "B56"

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        for number, (key, sink) in enumerate(requests):
            try:
                outcome: bool | Exception = self.read_by_way_of_scratch(key, sink)
            except Exception as error:
                outcome = error
            done(number, outcome)
