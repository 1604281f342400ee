"""Faults of the ways to write besides `put`, and of many buffers and bytes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence

from kvloom import Buffer, Buffers
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.backend import DirectoryBackend
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend


class WritesAThousandBuffers(Mutant, DirectoryBackend):
    """The limit of one system call."""

    breaks = "B01"

    def put(self, key: str, blob: Buffers) -> None:
        super().put(key, blob[:1024])


class SendsOneMessage(Mutant, DirectoryBackend):
    """At most four megabytes, a common limit."""

    breaks = "B01"

    def put(self, key: str, blob: Buffers) -> None:
        if sum(map(len, blob)) > 4 << 20:
            raise ValueError("the message is too long")
        super().put(key, blob)


class ReturnsNumbers(Mutant, DirectoryBackend):
    """Returns a list of numbers, which `bytes` accepts but is no buffer."""

    breaks = "B01"

    def get(self, key: str) -> Buffer | None:
        blob = super().get(key)
        return None if blob is None else list(blob)  # type: ignore[return-value]


class CreatesInPlace(Mutant, CompleteDirectoryBackend):
    """A file that must not be there yet is no draft: what is written is seen, and stays if the rest cannot be had."""

    breaks = "B12"

    def create(self, key: str, blob: Buffers) -> bool:
        try:
            with self._file(key).open("xb") as file:
                file.writelines(blob)
        except FileExistsError:
            return False
        return True


class WritesOverAVictim(Mutant, DirectoryBackend):
    """In the place that the new blob is to have."""

    breaks = "B12"

    def put_over(self, key: str, blob: Buffers, victims: Sequence[str]) -> None:
        there = [victim for victim in victims if self.contains(victim)]
        if not there:
            return self.put(key, blob)
        os.replace(self._file(there[0]), self._file(key))
        self.delete_many(there[1:])
        with self._file(key).open("r+b") as file:
            file.writelines(blob)
            file.truncate()


class SwallowsDeleteErrors(Mutant, DirectoryBackend):
    """Ignores every error of removing a file; FileNotFoundError was meant."""

    breaks = "B48"

    def delete(self, key: str) -> None:
        with contextlib.suppress(OSError):
            super().delete(key)


class SwallowsErrorsOfMany(Mutant, DirectoryBackend):
    """One that cannot be deleted is not to keep the others."""

    breaks = "B48"

    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            with contextlib.suppress(OSError):
                self.delete(key)


class LeavesDraftsOfFailedPuts(Mutant, DirectoryBackend):
    """No listing shows them."""

    breaks = "B49"

    def _draft(self, blob: Buffers) -> str:
        number, name = tempfile.mkstemp(prefix="+", dir=self._path)
        with open(number, "wb") as file:
            file.writelines(blob)
        return name


class LeavesDraftsOfAFullDisk(Mutant, DirectoryBackend):
    """It joins the blob first, so that nothing can be wrong with it any more."""

    breaks = "B49"

    def put(self, key: str, blob: Buffers) -> None:
        whole = b"".join(blob)
        number, name = tempfile.mkstemp(prefix="+", dir=self._path)
        with open(number, "wb") as file:
            file.write(whole)
        os.replace(name, self._file(key))


class LeavesDraftsOfWhatItCreates(Mutant, CompleteDirectoryBackend):
    """It removes them after the link, and not where it never comes to that."""

    breaks = "B49"

    def create(self, key: str, blob: Buffers) -> bool:
        number, name = tempfile.mkstemp(prefix="+", dir=self._path)
        with open(number, "wb") as file:
            file.writelines(blob)
        try:
            os.link(name, self._file(key))
        except FileExistsError:
            return False
        finally:
            os.unlink(name)
        return True
