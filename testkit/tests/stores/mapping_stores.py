"""Stores that are mappings: `dbm.dumb`, `sqlitedict`, `rocksdict`."""

from __future__ import annotations

import dbm.dumb
from collections.abc import Iterator
from typing import Any

from kvloom import Buffer, Buffers, Entry, StorageBackend, join
from stores.at_path import AtPath


class Mapping(StorageBackend):
    """The common part of the stores."""

    type = "mapping"
    persistent = True
    Config = AtPath

    def __init__(self, config: AtPath, spec: object = None) -> None:
        super().__init__(config)
        config.path.mkdir(parents=True, exist_ok=True)
        self.mapping = self.opened(str(config.path / "store"))

    def opened(self, path: str) -> Any:
        raise NotImplementedError

    def put(self, key: str, blob: Buffers) -> None:
        self.mapping[key] = join(blob)

    def get(self, key: str) -> Buffer | None:
        return self.mapping.get(key)

    def contains(self, key: str) -> bool:
        return key in self.mapping

    def delete(self, key: str) -> None:
        if key in self.mapping:
            del self.mapping[key]

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        names = (key.decode() if isinstance(key, bytes) else key for key in self.mapping.keys())  # noqa: SIM118
        for name in names:
            if name.startswith(prefix) and (data := self.get(name)) is not None:
                yield Entry(name, len(data), 0.0)

    def close(self) -> None:
        self.mapping.close()


class DbmDumb(Mapping):
    type = "dbm_dumb"

    def opened(self, path: str) -> Any:
        return dbm.dumb.open(path, "c")


class SqliteDict(Mapping):
    type = "sqlitedict"
    shared = True

    def opened(self, path: str) -> Any:
        import sqlitedict

        return sqlitedict.SqliteDict(path, autocommit=True, encode=bytes, decode=bytes)


class RocksDict(Mapping):
    type = "rocksdict"

    def opened(self, path: str) -> Any:
        import rocksdict

        return rocksdict.Rdict(path)
