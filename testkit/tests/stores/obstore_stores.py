"""`obstore`: the object_store crate's memory and local file system."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import obstore
from obstore.store import LocalStore, MemoryStore

from kvloom import Buffer, Buffers, Config, Entry, StorageBackend, join
from stores.at_path import AtPath


class ObstoreMemory(StorageBackend):
    type = "obstore_memory"

    def __init__(self, config: Config, spec: object = None) -> None:
        super().__init__(config)
        self.store: Any = MemoryStore()

    def put(self, key: str, blob: Buffers) -> None:
        obstore.put(self.store, key, join(blob))

    def get(self, key: str) -> Buffer | None:
        try:
            return bytes(obstore.get(self.store, key).bytes())
        except FileNotFoundError:
            return None

    def contains(self, key: str) -> bool:
        try:
            return bool(obstore.head(self.store, key))
        except FileNotFoundError:
            return False

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self.store, key)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        for page in obstore.list(self.store):  # its prefixes are whole parts
            for about in page:
                if about["path"].startswith(prefix):
                    yield Entry(about["path"], about["size"], about["last_modified"].timestamp())

    def create(self, key: str, blob: Buffers) -> bool:
        try:
            obstore.put(self.store, key, join(blob), mode="create")
        except obstore.exceptions.AlreadyExistsError:
            return False
        return True


class ObstoreLocal(ObstoreMemory):
    type = "obstore_local"
    persistent = shared = True
    Config = AtPath

    def __init__(self, config: AtPath, spec: object = None) -> None:
        super().__init__(config)
        self.store = LocalStore(str(config.path), mkdir=True)
