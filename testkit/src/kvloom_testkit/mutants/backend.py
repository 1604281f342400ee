"""Storage backends with a fault each, and odd ones."""

from __future__ import annotations

from kvloom import Buffer, Buffers
from kvloom_testkit.mutants import Mutant, Oddity
from kvloom_testkit.reference.backend import DirectoryBackend


class WritesOnlyTheFirstBuffer(Mutant, DirectoryBackend):
    """Forgets that a blob may be in several."""

    breaks = "B01"

    def put(self, key: str, blob: Buffers) -> None:
        super().put(key, blob[:1])


class RaisesWhenThereIsNothing(Mutant, DirectoryBackend):
    """Lets the client's exception out."""

    breaks = "B02"

    def get(self, key: str) -> Buffer | None:
        return self._file(key).read_bytes()


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


class ReturnsViews(Oddity, DirectoryBackend):
    """A memoryview is a buffer like any other."""

    def get(self, key: str) -> Buffer | None:
        blob = super().get(key)
        return None if blob is None else memoryview(blob)
