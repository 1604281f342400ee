"""Embedded databases with transactions or batches: LMDB, LevelDB (`plyvel`) and ZODB."""

from __future__ import annotations

from collections.abc import Iterator

from kvloom import Buffer, Buffers, Entry, StorageBackend, join
from stores.at_path import AtPath


class Lmdb(StorageBackend):
    """Not `shared`, though processes may share it: one process cannot open it twice."""

    type = "lmdb"
    persistent = True
    Config = AtPath

    def __init__(self, config: AtPath, spec: object = None) -> None:
        import lmdb

        super().__init__(config)
        self.env = lmdb.open(str(config.path), map_size=256 << 20)

    def put(self, key: str, blob: Buffers) -> None:
        with self.env.begin(write=True) as change:
            change.put(key.encode(), join(blob))

    def get(self, key: str) -> Buffer | None:
        with self.env.begin() as view:
            return view.get(key.encode())

    def contains(self, key: str) -> bool:
        return self.get(key) is not None

    def delete(self, key: str) -> None:
        with self.env.begin(write=True) as change:
            change.delete(key.encode())

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        with self.env.begin() as view, view.cursor() as cursor:
            found = [Entry(bytes(key).decode(), len(data), 0.0) for key, data in cursor]
        return (entry for entry in found if entry.key.startswith(prefix))

    def close(self) -> None:
        self.env.close()


class LevelDb(StorageBackend):
    type = "leveldb"
    persistent = True
    Config = AtPath

    def __init__(self, config: AtPath, spec: object = None) -> None:
        import plyvel

        super().__init__(config)
        self.db = plyvel.DB(str(config.path), create_if_missing=True)

    def put(self, key: str, blob: Buffers) -> None:
        self.db.put(key.encode(), join(blob))

    def get(self, key: str) -> Buffer | None:
        return self.db.get(key.encode())

    def contains(self, key: str) -> bool:
        return self.get(key) is not None

    def delete(self, key: str) -> None:
        self.db.delete(key.encode())

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        with self.db.iterator(prefix=prefix.encode()) as found:
            yield from (Entry(key.decode(), len(data), 0.0) for key, data in found)

    def close(self) -> None:
        self.db.close()


class Zodb(StorageBackend):
    type = "zodb"
    persistent = True
    Config = AtPath

    def __init__(self, config: AtPath, spec: object = None) -> None:
        import ZODB
        from BTrees.OOBTree import OOBTree

        super().__init__(config)
        config.path.mkdir(parents=True, exist_ok=True)
        self.db = ZODB.DB(str(config.path / "Data.fs"))
        with self.db.transaction() as connection:
            if "blobs" not in connection.root():
                connection.root()["blobs"] = OOBTree()

    def put(self, key: str, blob: Buffers) -> None:
        with self.db.transaction() as connection:
            connection.root()["blobs"][key] = join(blob)

    def get(self, key: str) -> Buffer | None:
        with self.db.transaction() as connection:
            return connection.root()["blobs"].get(key)

    def contains(self, key: str) -> bool:
        return self.get(key) is not None

    def delete(self, key: str) -> None:
        with self.db.transaction() as connection:
            connection.root()["blobs"].pop(key, None)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        with self.db.transaction() as connection:
            found = [Entry(key, len(data), 0.0) for key, data in connection.root()["blobs"].items()]
        return (entry for entry in found if entry.key.startswith(prefix))

    def close(self) -> None:
        self.db.close()
