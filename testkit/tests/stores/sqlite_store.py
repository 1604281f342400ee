"""One table of `sqlite3`, a connection and a lock."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

from kvloom import Buffer, Buffers, Entry, StorageBackend, join
from stores.at_path import AtPath


class Sqlite(StorageBackend):
    type = "sqlite"
    persistent = shared = True
    Config = AtPath

    def __init__(self, config: AtPath, spec: object = None) -> None:
        super().__init__(config)
        config.path.mkdir(parents=True, exist_ok=True)
        self.lock = threading.Lock()
        self.db = sqlite3.connect(config.path / "kv.db", check_same_thread=False, isolation_level=None)
        self._sql("create table if not exists blob (key text primary key, data blob not null)")

    def _sql(self, query: str, *values: Any) -> list[Any]:
        with self.lock:
            return self.db.execute(query, values).fetchall()

    def put(self, key: str, blob: Buffers) -> None:
        self._sql("replace into blob values (?, ?)", key, join(blob))

    def get(self, key: str) -> Buffer | None:
        rows = self._sql("select data from blob where key = ?", key)
        return rows[0][0] if rows else None

    def contains(self, key: str) -> bool:
        return bool(self._sql("select 1 from blob where key = ?", key))

    def delete(self, key: str) -> None:
        self._sql("delete from blob where key = ?", key)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        rows = self._sql("select key, length(data) from blob where substr(key, 1, ?) = ?", len(prefix), prefix)
        return (Entry(key, size, 0.0) for key, size in rows)

    def close(self) -> None:
        self.db.close()
