"""Faults of names: keys that are taken for each other, or for what they are part of."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.backend import DirectoryBackend


class SlashesBecomeUnderscores(Mutant, DirectoryBackend):
    """Keys may contain underscores themselves."""

    breaks = "B08"

    def _file(self, key: str) -> Path:
        return self._path / key.replace("/", "_")


class FoldsLetterCase(Mutant, DirectoryBackend):
    """Like some file systems."""

    breaks = "B08"

    def _file(self, key: str) -> Path:
        return super()._file(key.lower())


class LeavesTheSaltOut(Mutant, DirectoryBackend):
    """Two tenants share what they should not."""

    breaks = "B08"

    def _file(self, key: str) -> Path:
        fingerprint, *rest = key.split("/")
        return super()._file("/".join([fingerprint, *rest[1:]] if len(rest) == 2 else [fingerprint, *rest]))


class CutsLongNames(Mutant, DirectoryBackend):
    """Because a file's name has its limits."""

    breaks = "B08"

    def _file(self, key: str) -> Path:
        return self._path / super()._file(key).name[:192]


class NamesFilesByAShortDigest(Mutant, DirectoryBackend):
    """Too few bits for the keys that there are."""

    breaks = "B08"

    def _file(self, key: str) -> Path:
        return self._path / f"{zlib.crc32(key.encode()) & 0xFF:02x}"


class NamesFilesByAChecksum(Mutant, DirectoryBackend):
    """A checksum is made to find flipped bits, not to name files."""

    breaks = "B08"

    def _file(self, key: str) -> Path:
        return self._path / f"{zlib.crc32(key.encode()):08x}"


class NamesFilesBySumsOfLetters(Mutant, DirectoryBackend):
    """The other checksum of zlib."""

    breaks = "B08"

    def _file(self, key: str) -> Path:
        return self._path / f"{zlib.adler32(key.encode()):08x}"


class NamesFilesByEightDigits(Mutant, DirectoryBackend):
    """32 bits of a good digest are too few."""

    breaks = "B08"

    def _file(self, key: str) -> Path:
        return self._path / hashlib.sha256(key.encode()).hexdigest()[:8]


class NeedsADirectoryWhereAFileIs(Mutant, DirectoryBackend):
    """Keys are paths: one that is the beginning of another is in its way."""

    breaks = "B08"

    def _file(self, key: str) -> Path:
        file = self._path / key
        file.parent.mkdir(parents=True, exist_ok=True)
        return file


class DeletesWhatIsBelow(Mutant, DirectoryBackend):
    """A key is a directory, and goes with all that is in it."""

    breaks = "B04"

    def delete(self, key: str) -> None:
        for entry in self.scan(f"{key}/"):
            super().delete(entry.key)
        super().delete(key)


class TakesADirectoryForABlob(Mutant, DirectoryBackend):
    """Something is there, though it is none."""

    breaks = "B05"

    def contains(self, key: str) -> bool:
        return super().contains(key) or any(self.scan(f"{key}/"))
