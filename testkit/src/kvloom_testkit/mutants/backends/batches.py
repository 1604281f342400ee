"""Faults of batches beside failures, callers that break off, and `close`."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from kvloom import Buffers, ReadDone, Sink, StorageBackend, WriteDone
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.backend import DirectoryBackend
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend


class BatchIsStoredOnceItIsQueued(Mutant, DirectoryBackend):
    """Its outcome is not waited for."""

    breaks = "B52"

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        for number in range(len(requests)):
            done(number, None)
        super().put_many(requests, lambda number, outcome: None)


class BatchOfPutsEndsWithAFailure(Mutant, DirectoryBackend):
    """All that come after it have failed too."""

    breaks = "B52"

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        for number, (key, blob) in enumerate(requests):
            self.put(key, blob)
            done(number, None)


class BatchHasOneOutcome(Mutant, DirectoryBackend):
    """Reports the first failure for every blob of the batch."""

    breaks = "B52"

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        failed: list[Exception] = []
        super().put_many(requests, lambda number, outcome: failed.append(outcome) if outcome else None)
        for number in range(len(requests)):
            done(number, failed[0] if failed else None)


class BatchOfPutsHidesFailures(Mutant, DirectoryBackend):
    """Ignores every error of a batch, as a cache might."""

    breaks = "B52"

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        super().put_many(requests, lambda number, outcome: done(number, None))


class BatchKeepsTheFirstOfTwo(Mutant, DirectoryBackend):
    """The later blob of a key is left out, and counts as stored."""

    breaks = "B52"

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        seen: set[str] = set()
        for number, (key, blob) in enumerate(requests):
            if key in seen:
                done(number, None)
                continue
            seen.add(key)
            super().put_many([(key, blob)], lambda _, outcome, number=number: done(number, outcome))


class BatchReportsOnAThreadOfItsOwn(Mutant, DirectoryBackend):
    """Reports an outcome on the thread that wrote the blob, not on the caller's."""

    breaks = "B52"

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        thread = threading.Thread(target=super().put_many, args=(requests, done))
        thread.start()
        thread.join()


class BatchKeepsItsLock(Mutant, DirectoryBackend):
    """Does not release its lock if the caller breaks off."""

    breaks = "B53"
    _busy = False

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        self._busy = True
        super().put_many(requests, done)
        self._busy = False

    def put(self, key: str, blob: Buffers) -> None:
        if self._busy and key.endswith("new"):
            raise OSError("another call is under way")
        super().put(key, blob)


class BatchEndsWithASinkThatBreaksOff(Mutant, CompleteDirectoryBackend):
    """A sink may refuse memory, and nothing else."""

    breaks = "B53"

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        for number, (key, sink) in enumerate(requests):
            data = self.get(key)
            if data is not None:
                try:
                    memory = sink.reserve(len(data))
                except Exception as error:
                    done(number, error)
                    continue
                memory[:] = data
                sink.filled(len(data))
            done(number, data is not None)


class BatchPutsAgainWhatTheCallerHasBrokenOff(Mutant, DirectoryBackend):
    """Tries the whole batch again after any error, the caller's included."""

    breaks = "B53"

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        try:
            super().put_many(requests, done)
        except Exception:
            super().put_many(requests, done)


class BatchReadsWhatFits(Mutant, CompleteDirectoryBackend):
    """Asks for the size, then reads up to that many bytes of the blob that is there by then."""

    breaks = "B54"

    def get_into(self, key: str, sink: Sink) -> bool:
        try:
            memory = sink.reserve(os.stat(self._file(key)).st_size)
        except FileNotFoundError:
            return False
        data = (self.get(key) or b"")[: len(memory)]
        memory[: len(data)] = data
        sink.filled(len(memory))
        return True


class BatchEndsWithABlobThatIsGone(Mutant, CompleteDirectoryBackend):
    """Ends the batch if a blob has gone since it looked."""

    breaks = "B54"

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        for number, (key, sink) in enumerate(requests):
            size = self._file(key).stat().st_size
            memory = sink.reserve(size)
            data = self._file(key).read_bytes()
            if len(data) != size:
                done(number, OSError("it has changed"))
                continue
            memory[:] = data
            sink.filled(size)
            done(number, True)


class _Closing(DirectoryBackend):
    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


class CloseDropsTheRestOfABatch(Mutant, _Closing):
    """Drops the writes that are queued when it is closed, without an outcome."""

    breaks = "B55"

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        for number, (key, blob) in enumerate(requests):
            if not self.closed:
                self.put(key, blob)
            done(number, None)


class CloseCutsABatchShort(Mutant, _Closing):
    """The blob that is being written ends where it is."""

    breaks = "B55"

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        for number, (key, blob) in enumerate(requests):
            if self.closed:
                self._file(key).write_bytes(b"".join(blob)[:1000])
                raise OSError("closed")
            super().put_many([(key, blob)], lambda _, outcome, number=number: done(number, outcome))


class CloseSilencesABatch(Mutant, _Closing):
    """It reports nothing of the rest, and returns as if all were well."""

    breaks = "B55"

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        def tell(number: int, outcome: Exception | None) -> None:
            if not self.closed:
                done(number, outcome)

        StorageBackend.put_many(self, requests, tell)
