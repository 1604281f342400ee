"""Drives one storage as SGLang's cache controller drives it, over a host pool of the kit's."""

from __future__ import annotations

import hashlib
import importlib
import os
import threading
import time
from typing import Any

import torch

from kvloom_testkit.engines.rename_barrier import RenamesTogether
from kvloom_testkit.engines.sglang.pool import HostPool
from kvloom_testkit.engines.slow_writes import WritesSlowly

_CANARY = 0x44
"""Every byte of pages that nothing was asked for."""
_DIRECTORY = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


class Driver(RenamesTogether, WritesSlowly):
    """The calls. Pages are numbers; each has a key and content of its own, which follow from it."""

    def start(
        self, name: str, module: str | None, extra: dict[str, Any], folder: str, layout: str, dtype: str,
        page_size: int, model: str, ranks: list[int], latents: bool,
    ) -> None:  # fmt: skip
        """Make the storage by SGLang's own factory. ranks: this one's number, and their number."""
        os.environ[_DIRECTORY] = folder  # where SGLang's own storage of files has them
        interface = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        factory = importlib.import_module("sglang.srt.mem_cache.storage").StorageBackendFactory
        self._pool = HostPool(
            layers=3, heads=2, head_size=8, dtype=getattr(torch, dtype), pages=32, page_size=page_size, layout=layout
        )
        told = {"backend_name": name, "module_path": module, "class_name": name, **extra} if module else extra
        rank, count = ranks
        config = interface.HiCacheStorageConfig(
            tp_rank=rank, tp_size=count, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=latents,
            enable_storage_metrics=False, is_page_first_layout=layout == "page_first", model_name=model,
            extra_config=told,
        )  # fmt: skip
        self._storage = factory.create_backend("dynamic" if module else name, config, self._pool)
        self._storage.register_mem_pool_host(self._pool)
        if hasattr(self._storage, "on_host_pools_registered"):
            self._storage.on_host_pools_registered()
        self._rows = bool(told.get("interface_v1"))
        self._info = interface.HiCacheStorageExtraInfo(prefix_keys=[])

    def exists(self, pages: list[int]) -> int:
        """The number of leading pages that the storage says it has."""
        return int(self._storage.batch_exists(_keys(pages), self._info))

    def set(self, pages: list[int], at: list[int] | None = None) -> list[bool]:
        """Store pages, and write over their memory when that is said to be done. at: their places in the pool."""
        return self._store(pages, self._places(pages, at))

    def get(self, pages: list[int], at: list[int] | None = None) -> dict[str, Any]:
        """Load pages. `pages`: of each whether it is `right`, `wrong` or said to be `missing`; `others`: the number of
        pages that changed and were not asked for."""
        places = self._places(pages, at)
        every = range(0, self._pool.size, self._pool.page_size)
        for place in every:
            self._fill(place)
        found = self._load(pages, places)
        others = sum(bool((_bytes(self._pool.page(one)) != _CANARY).any()) for one in set(every) - set(places))
        return {"pages": found, "others": others}

    def _store(self, pages: list[int], places: list[int]) -> list[bool]:
        for page, place in zip(pages, places, strict=True):
            self._pool.page(place).copy_(self._content(page))
        if self._rows:
            done = list(self._storage.batch_set_v1(_keys(pages), self._indices(places), self._info))
        else:
            data = [self._pool.get_data_page(place) for place in places]
            done = [bool(self._storage.batch_set(_keys(pages), data))] * len(pages)
            for one in data:
                one.view(torch.uint8).fill_(_CANARY)
        for place in places:
            self._fill(place)
        return done

    def _load(self, pages: list[int], places: list[int]) -> list[str]:
        if self._rows:
            said = [bool(one) for one in self._storage.batch_get_v1(_keys(pages), self._indices(places), self._info)]
        else:
            got = self._storage.batch_get(_keys(pages), [self._pool.get_dummy_flat_data_page() for _ in pages])
            said = [one is not None for one in got]
            for place, data in zip(places, got, strict=True):
                if data is not None:
                    self._pool.set_from_flat_data_page(place, data)
        found = []
        for page, place, there in zip(pages, places, said, strict=True):
            same = torch.equal(_bytes(self._pool.page(place)), _bytes(self._content(page)))
            found.append("missing" if not there else "right" if same else "wrong")
        return found

    def clear(self) -> bool:
        """Clear the storage; return whether it said that it did."""
        return self._storage.clear() is not False

    def clears(self) -> bool:
        """Return whether the storage has a `clear` of its own."""
        base = importlib.import_module("sglang.srt.mem_cache.hicache_storage").HiCacheStorage
        return type(self._storage).clear is not base.clear

    def race(self, pages: list[int], seconds: float) -> list[str]:
        """Store and count pages from one thread and load them from another; what went wrong, or raised."""
        faults: list[str] = []
        until = time.monotonic() + seconds
        half = self._pool.size // self._pool.page_size // 2
        source, target = (self._places(pages, list(range(first, first + len(pages)))) for first in (0, half))

        def store() -> None:
            try:
                while time.monotonic() < until:
                    self._store(pages, source)
                    self.exists(pages)
            except Exception as error:
                faults.append(f"storing raised {type(error).__name__}: {error}")

        other = threading.Thread(target=store)
        other.start()
        try:
            while time.monotonic() < until and not faults:
                if "wrong" in (found := self._load(pages, target)):
                    faults.append(f"pages were loaded as {found}")
        except Exception as error:
            faults.append(f"loading raised {type(error).__name__}: {error}")
        other.join()
        return faults

    def write_one(self, pages: list[int]) -> list[list[str]]:
        """Store pages."""
        self.set(pages)
        return []

    def read_one(self, pages: list[int], stores: bool) -> list[list[str]]:
        """Load pages, as `get` does. stores: after storing them, unless they are there."""
        if stores and self.exists(pages) < len(pages):
            self.set(pages)
        return [self.get(pages)["pages"]]

    def longest(self, pages: list[int]) -> float:
        """The longest seconds of one call of each kind, with what is there and what is not."""
        longest = 0.0
        for call in (self.set, self.get, self.exists):
            begin = time.perf_counter()
            call(pages)
            longest = max(longest, time.perf_counter() - begin)
        return longest

    def state(self) -> dict[str, int]:
        """Threads and descriptors of the process."""
        return {"threads": len(os.listdir("/proc/self/task")), "descriptors": len(os.listdir("/proc/self/fd"))}

    def close(self) -> None:
        """Close the storage, if it can be."""
        if hasattr(self._storage, "close"):
            self._storage.close()

    def _places(self, pages: list[int], at: list[int] | None) -> list[int]:
        return [place * self._pool.page_size for place in (range(len(pages)) if at is None else at)]

    def _indices(self, places: list[int]) -> torch.Tensor:
        return torch.cat([torch.arange(place, place + self._pool.page_size) for place in places])

    def _fill(self, place: int) -> None:
        page = self._pool.page(place)
        page.copy_(torch.full(page.shape, _CANARY, dtype=torch.uint8).repeat_interleave(
            page.element_size(), -1).view(page.dtype))  # fmt: skip

    def _content(self, page: int) -> torch.Tensor:
        """The same KV in every layout."""
        pool, generator = self._pool, torch.Generator().manual_seed(page)
        kv = torch.randn((2, pool.layer_num, pool.page_size, pool.head_num, pool.head_dim), generator=generator)
        return (kv.transpose(1, 2) if pool.layout == "page_first" else kv).to(pool.dtype)


def _keys(pages: list[int]) -> list[str]:
    """Hashes as SGLang has them, which cover all tokens of a prompt up to a page's end."""
    return [hashlib.sha256(f"page {page}".encode()).hexdigest() for page in pages]


def _bytes(page: torch.Tensor) -> torch.Tensor:
    return page.contiguous().view(torch.uint8)
