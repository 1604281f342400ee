"""Faults of the ways to write besides `put`, and of many buffers and bytes."""

from __future__ import annotations

import os
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
    """`bytes` makes a blob of them; a buffer they are not."""

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
