"""`diskcache.Cache`."""

from __future__ import annotations

from collections.abc import Iterator

import diskcache

from kvloom import Buffer, Buffers, Entry, StorageBackend, join
from stores.at_path import AtPath


class DiskCache(StorageBackend):
    type = "diskcache"
    persistent = shared = bounded = True
    Config = AtPath

    def __init__(self, config: AtPath, spec: object = None) -> None:
        super().__init__(config)
        self.cache = diskcache.Cache(str(config.path))

    def put(self, key: str, blob: Buffers) -> None:
        self.cache.set(key, join(blob))

    def get(self, key: str) -> Buffer | None:
        return self.cache.get(key)

    def contains(self, key: str) -> bool:
        return key in self.cache

    def delete(self, key: str) -> None:
        self.cache.delete(key)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        for key in self.cache:
            if key.startswith(prefix) and (data := self.cache.get(key)) is not None:
                yield Entry(key, len(data), 0.0)

    def create(self, key: str, blob: Buffers) -> bool:
        return bool(self.cache.add(key, join(blob)))

    def close(self) -> None:
        self.cache.close()
