"""File systems of fsspec: `memory` and `file`."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec

from kvloom import Buffer, Buffers, Config, Entry, StorageBackend, join
from stores.at_path import AtPath


class FsspecMemory(StorageBackend):
    type = "fsspec_memory"

    def __init__(self, config: Config, spec: object = None) -> None:
        super().__init__(config)
        self.fs, self.root = fsspec.filesystem("memory"), "/kit"

    def put(self, key: str, blob: Buffers) -> None:
        self.fs.makedirs(self.fs._parent(f"{self.root}/{key}"), exist_ok=True)
        self.fs.pipe_file(f"{self.root}/{key}", join(blob))

    def get(self, key: str) -> Buffer | None:
        return self.fs.cat_file(f"{self.root}/{key}") if self.contains(key) else None

    def contains(self, key: str) -> bool:
        return bool(self.fs.isfile(f"{self.root}/{key}"))

    def delete(self, key: str) -> None:
        if self.contains(key):
            self.fs.rm_file(f"{self.root}/{key}")

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        for name, about in self.fs.find(self.root, detail=True).items():
            if (key := name[len(self.root) + 1 :]).startswith(prefix):
                yield Entry(key, about["size"], about.get("mtime", 0.0))


class FsspecLocal(FsspecMemory):
    type = "fsspec_local"
    persistent = shared = True
    Config = AtPath

    def __init__(self, config: AtPath, spec: object = None) -> None:
        super().__init__(config)
        self.fs, self.root = fsspec.filesystem("file"), str(config.path)
