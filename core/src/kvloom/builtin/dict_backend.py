"""Blobs in a dictionary: the backend for tests, and the shortest one to read."""

from __future__ import annotations

from collections.abc import Iterator

from kvloom import Buffer, Buffers, Config, Entry, StorageBackend, join


class DictBackend(StorageBackend):
    """Keeps blobs in this process's memory. Gone when it closes."""

    type = "dict"

    def __init__(self, config: Config, spec: object = None) -> None:
        super().__init__(config)
        self._blobs: dict[str, bytes] = {}

    def put(self, key: str, blob: Buffers) -> None:
        self._blobs[key] = join(blob)

    def get(self, key: str) -> Buffer | None:
        return self._blobs.get(key)

    def contains(self, key: str) -> bool:
        return key in self._blobs

    def delete(self, key: str) -> None:
        self._blobs.pop(key, None)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        for key, blob in list(self._blobs.items()):
            if key.startswith(prefix):
                yield Entry(key, len(blob), 0.0)
