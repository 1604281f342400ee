"""A storage backend that keeps its blobs in one directory, a file each, by the shortest way that is right."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvloom import Buffer, Buffers, Config, Entry, KVSpec, StorageBackend


class DirectoryConfig(Config):
    """Its settings in YAML; anything else is an error."""

    path: Path
    """The directory of the files; made if it is not there."""


class DirectoryBackend(StorageBackend):
    """Files in a directory. Each is written under another name first, so that readers never see half of it."""

    type = "kit_directory"
    persistent = True
    shared = True
    Config = DirectoryConfig

    def __init__(self, config: DirectoryConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._path = config.path
        self._path.mkdir(parents=True, exist_ok=True)
        self._rights: dict[str, int] = {}

    def put(self, key: str, blob: Buffers) -> None:
        os.replace(self._draft(blob), self._file(key))

    def get(self, key: str) -> Buffer | None:
        try:
            return self._file(key).read_bytes()
        except FileNotFoundError:
            return None

    def contains(self, key: str) -> bool:
        return self._file(key).exists()

    def delete(self, key: str) -> None:
        self._file(key).unlink(missing_ok=True)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        with os.scandir(self._path) as files:
            for file in files:
                key = file.name.replace("=", "/")
                if not key.startswith("+") and key.startswith(prefix):
                    try:
                        status = file.stat()
                    except FileNotFoundError:  # deleted meanwhile
                        continue
                    yield Entry(key, status.st_size, status.st_mtime)

    def hold(self, name: str) -> bool:
        if name in self._rights:
            return True
        number = os.open(self._path / f"+hold-{name}", os.O_CREAT)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another instance has it, of this process or another
            os.close(number)
            return False
        self._rights[name] = number  # the right ends when it is closed, also by the end of the process
        return True

    def close(self) -> None:
        while self._rights:
            os.close(self._rights.popitem()[1])

    def _draft(self, blob: Buffers) -> str:
        """A new file with the blob in it, under a name that no key has."""
        number, name = tempfile.mkstemp(prefix="+", dir=self._path)
        try:
            with open(number, "wb") as file:
                for part in blob:
                    file.write(part)
        except BaseException:
            os.unlink(name)
            raise
        return name

    def _file(self, key: str) -> Path:
        return self._path / key.replace("/", "=")  # no key has a "="
