"""The reference backends, and the one way that is not through the registry: the fixture `raw`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvloom import Buffer, Buffers, KVSpec, StorageBackend
from kvloom_testkit import BackendConformance, effort
from kvloom_testkit.backends import deaths, programs
from kvloom_testkit.backends.base import Raw
from kvloom_testkit.reference.backend import DirectoryBackend
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend


@pytest.fixture(autouse=True)
def brief(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is tried at length: the others are the same but for a few requirements."""
    monkeypatch.setattr(effort, "brief", request.cls is not TestDirectory)


class Files:
    """Reads and writes the files of a `DirectoryBackend`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, key: str) -> bytes | None:
        file = self._path / key.replace("/", "=")
        return file.read_bytes() if file.exists() else None

    def set(self, key: str, blob: bytes) -> None:
        (self._path / key.replace("/", "=")).write_bytes(blob)


class TestDirectory(BackendConformance):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], StorageBackend]:
        return lambda: DirectoryBackend(DirectoryBackend.Config(path=tmp_path))

    @pytest.fixture
    def raw(self, tmp_path: Path) -> Raw:
        return Files(tmp_path)


class TestCompleteDirectory(BackendConformance):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], StorageBackend]:
        return lambda: CompleteDirectoryBackend(CompleteDirectoryBackend.Config(path=tmp_path))


class Backwards(DirectoryBackend):
    """Writes every blob from its end, and reads it so: only who goes round it can tell."""

    def put(self, key: str, blob: Buffers) -> None:
        super().put(key, [b"".join(blob)[::-1]])

    def get(self, key: str) -> Buffer | None:
        blob = super().get(key)
        return None if blob is None else bytes(blob)[::-1]


class TestBackwards(BackendConformance):
    slow = ("B23", "B24", "B26", "B36", "B37", "B45", "B46", "B47", "B48", "B49")

    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], StorageBackend]:
        return lambda: Backwards(Backwards.Config(path=tmp_path))

    @pytest.fixture
    def raw(self, tmp_path: Path) -> Raw:
        return Files(tmp_path)

    @pytest.mark.xfail(
        reason="it turns blobs round, which the kit sees only round the backend",
    )
    def test_B34_put_and_get_do_not_hide_faults_of_each_other(self) -> None:  # type: ignore[override]
        """The kit's own test runs."""


class Importing(DirectoryBackend):
    """Imports something as late as it is opened."""

    def __init__(self, config: DirectoryBackend.Config, spec: KVSpec | None = None) -> None:
        import colorsys  # noqa: F401

        super().__init__(config, spec)


def test_forks_of_a_program_find_imported_what_opening_imports(tmp_path: Path) -> None:
    backend = Importing(Importing.Config(path=tmp_path))
    looks = "print('colorsys' in sys.modules)\n"
    program = f"{deaths.CHILDREN}{looks}import_what_opening_imports()\n{looks}"
    assert programs.run(program, backend, []).split() == ["False", "True"]
