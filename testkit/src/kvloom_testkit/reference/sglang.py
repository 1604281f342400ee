"""A storage of SGLang's HiCache that keeps each page in a file of one directory, by the shortest way that is right.

It imports nothing of kvloom.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

_DIGEST_BYTES = 32


class DirectoryStorage(HiCacheStorage):  # type: ignore[misc]
    """`extra_config`: `path`, the directory."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self.config = storage_config
        self.root = Path(storage_config.extra_config["path"])
        self.folder = self.root

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """From here on it is known what a page is."""
        super().register_mem_pool_host(mem_pool_host)
        self.folder = self.root / self.fingerprint(mem_pool_host)
        self.folder.mkdir(parents=True, exist_ok=True)

    def fingerprint(self, pool: Any) -> str:
        """A name for all that decides which bytes a page has, apart from its tokens."""
        parts = (
            self.model(),
            pool.dtype,
            pool.page_size,
            pool.layout,
            pool.get_dummy_flat_data_page().numel(),
            self.rank(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def model(self) -> str:
        """The model that the pages are of."""
        return str(self.config.model_name)

    def rank(self) -> tuple[int, ...]:
        """Whose part of the model it is; ranks have the same latents."""
        config = self.config
        own = (config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size)
        return own if config.is_mla_model else (*own, config.tp_rank, config.tp_size)

    def path(self, key: str) -> Path:
        """The file of a page."""
        return self.folder / key

    def exists(self, key: str) -> bool:
        """Return whether there is a file."""
        return self.path(key).exists()

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Write a file under another name first, so that readers never see half of it."""
        data = value.contiguous().view(torch.uint8).numpy().tobytes()
        draft = self.draft(key)
        draft.write_bytes(hashlib.sha256(data).digest() + data)
        draft.replace(self.path(key))
        return True

    def draft(self, key: str) -> Path:
        """A name that no other thread uses."""
        return self.folder / f"{key}.{os.getpid()}.{threading.get_ident()}"

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages."""
        done = [self.set(key, value) for key, value in zip(keys, values, strict=True)]
        return all(done)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Fill the memory of a page; None if its file is gone or damaged."""
        data = self.read(key)
        page: torch.Tensor = target_location
        if data is None or len(data) != page.numel() * page.element_size():
            return None
        page.view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
        return page

    def read(self, key: str) -> bytearray | None:
        """The bytes of a page, verified."""
        try:
            data = bytearray(self.path(key).read_bytes())
        except OSError:
            return None
        whole = hashlib.sha256(data[_DIGEST_BYTES:]).digest() == data[:_DIGEST_BYTES]
        return data[_DIGEST_BYTES:] if whole else None

    def batch_get(
        self, keys: list[str], target_locations: Sequence[Any] = (), target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Load pages."""
        return [self.get(key, place) for key, place in zip(keys, target_locations, strict=True)]

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Load pages into rows of the host pool."""
        pool = self.mem_pool_host
        got = self.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        for row, page in zip(self.rows(host_indices), got, strict=True):
            if page is not None:
                pool.set_from_flat_data_page(row, page)
        return [page is not None for page in got]

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store rows of the host pool."""
        rows = self.rows(host_indices)
        return [self.set(key, self.mem_pool_host.get_data_page(row)) for key, row in zip(keys, rows, strict=True)]

    def rows(self, indices: torch.Tensor) -> list[int]:
        """The first row of each page."""
        return [int(row) for row in indices[:: self.mem_pool_host.page_size]]

    def clear(self) -> None:
        """Remove the files."""
        for path in list(self.folder.iterdir()):
            path.unlink(missing_ok=True)
