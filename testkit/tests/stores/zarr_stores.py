"""Zarr's `MemoryStore` and `LocalStore`."""

from __future__ import annotations

from collections.abc import Iterator

from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore

from kvloom import Buffer, Buffers, Config, Entry, StorageBackend, join
from stores.at_path import AtPath


class ZarrMemory(StorageBackend):
    type = "zarr_memory"

    def __init__(self, config: Config, spec: object = None) -> None:
        super().__init__(config)
        self.store, self.prototype = MemoryStore(), default_buffer_prototype()

    def put(self, key: str, blob: Buffers) -> None:
        sync(self.store.set(key, self.prototype.buffer.from_bytes(join(blob))))

    def get(self, key: str) -> Buffer | None:
        found = sync(self.store.get(key, self.prototype))
        return None if found is None else found.to_bytes()

    def contains(self, key: str) -> bool:
        return bool(sync(self.store.exists(key)))

    def delete(self, key: str) -> None:
        sync(self.store.delete(key))

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        async def found() -> list[Entry]:
            return [Entry(key, await self.store.getsize(key), 0.0) async for key in self.store.list_prefix(prefix)]

        return iter(sync(found()))

    def close(self) -> None:
        self.store.close()


class ZarrLocal(ZarrMemory):
    type = "zarr_local"
    persistent = shared = True
    Config = AtPath

    def __init__(self, config: AtPath, spec: object = None) -> None:
        super().__init__(config)
        self.store = LocalStore(config.path)
