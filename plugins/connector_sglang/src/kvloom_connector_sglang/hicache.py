"""`KVLoomHiCache`: what SGLang's `--hicache-storage-backend dynamic` loads. The only module that imports SGLang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from kvloom import ConfigError, EngineConfig

from .identity import described
from .page_store import Moved, PageStore

_WHERE = "hicache_storage_backend_extra_config"
_MOST_SECONDS = 86_400
"""Longest `timeout` of a call."""


class KVLoomHiCache(HiCacheStorage):  # type: ignore[misc]
    """SGLang's pages in the tiers of a YAML file.

    Of `extra_config`: `config`, the path of the YAML file, or its content; `revision`, which weights the model has, for
    two fine-tunes of one name share nothing but that; `timeout`, seconds that a call may take to move pages or ask for
    them, 30 unless given. Only start-up raises. Afterwards a failure is a miss, counted and logged.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        extra = storage_config.extra_config or {}
        problems: list[tuple[str, str]] = []
        if not isinstance(extra.get("config"), str | Mapping):
            problems.append((f"{_WHERE}.config", "missing: a YAML file with kvloom's tiers, its path or its content"))
        if not isinstance(extra.get("revision", ""), str):
            problems.append((f"{_WHERE}.revision", "expected text: the commit of the weights, or any name for them"))
        timeout = extra.get("timeout", 30.0)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _MOST_SECONDS:
            text = f"expected seconds, more than 0 and at most {_MOST_SECONDS}, got {timeout!r}"
            problems.append((f"{_WHERE}.timeout", text))
        if problems:
            raise ConfigError.of_all(problems)
        self._storage = storage_config
        self._config = EngineConfig.load(extra["config"])
        self._revision, self._timeout = extra.get("revision", ""), float(timeout)
        self._pages: PageStore | None = None
        self._other_pools: list[str] = []

    # -- at start and at the end ---------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tiers: from here on it is known what a page is."""
        super().register_mem_pool_host(mem_pool_host)
        self.close()
        spec, geometry = described(self._storage, mem_pool_host, revision=self._revision)
        self._pages = PageStore(self._config, spec, geometry, timeout=self._timeout)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            self._other_pools.append(str(host_pool_name))

    def on_host_pools_registered(self) -> None:
        """Refuse models whose KV is more than pages: without the other pools no prefix of theirs can be restored."""
        if self._other_pools:
            self.close()
            names = ", ".join(self._other_pools)
            raise NotImplementedError(
                f"kvloom stores the pool kv only, but this model also has {names}; "
                "start SGLang without --hicache-storage-backend"
            )

    def close(self) -> None:
        """Write accepted pages and close the tiers. Idempotent."""
        if self._pages is not None:
            self._pages.close()

    # -- whole batches, between SGLang's host memory and the tiers -----------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Count the leading pages that the tiers report, without reading."""
        return 0 if self._pages is None else self._pages.exists(keys)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Fill pages of the host pool. host_indices: `page_size` rows for each key."""
        if self._pages is None:
            return [False] * len(keys)
        rows = self._rows(keys, host_indices)
        if rows is None:
            return self._pages.miss(len(keys), f"get: {len(keys)} keys do not go with the rows of the host pool")
        return self._pages.get(keys, pool=self.mem_pool_host, rows=rows)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Keep pages of the host pool. What every rank has alike (MLA) is kept by one of them."""
        if self._pages is None:
            return [False] * len(keys)
        if not self._storage.is_storage_writer:
            return [True] * len(keys)
        rows = self._rows(keys, host_indices)
        if rows is None:
            return self._pages.miss(len(keys), f"set: {len(keys)} keys do not go with the rows of the host pool")
        return self._pages.set(keys, pool=self.mem_pool_host, rows=rows)

    def _rows(self, keys: Sequence[str], host_indices: Any) -> torch.Tensor | None:
        step = self.mem_pool_host.page_size
        if not isinstance(host_indices, torch.Tensor) or host_indices.numel() != len(keys) * step:
            return None
        return host_indices.reshape(-1)[::step].cpu()

    # -- pages as tensors ----------------------------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """The pages, in `target_locations` if there are any; None for those that there are not."""
        if self._pages is None:
            return [None] * len(keys)
        try:
            places = target_locations
            if places is None:
                places = [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        except Exception as error:  # such as no memory
            self._pages.miss(len(keys), f"get: {type(error).__name__}: {error}")
            return [None] * len(keys)
        there = self._pages.get(keys, flat=list(places))
        return [place if here else None for place, here in zip(places, there, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Keep pages; whether all of them are kept."""
        if self._pages is None:
            return False
        if not self._storage.is_storage_writer:
            return True
        pages = list((target_locations if values is None else values) or ())
        if not all(isinstance(page, torch.Tensor) for page in pages):
            return all(self._pages.miss(len(keys), "set: a page is not a tensor"))
        return all(self._pages.set(keys, flat=[page.reshape(-1) for page in pages]))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # -- models with several pools: the one that is kept here ----------------------------------------------------------

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Like `batch_exists`; nothing if another pool would have to be restored too."""
        count = self.batch_exists(keys, extra_info)
        needed = [
            transfer
            for transfer in pool_transfers or ()
            if transfer.name != PoolName.KV and transfer.hit_policy != PoolHitPolicy.BLOCK_GROUPS
        ]
        hits = {PoolName.KV: count} if count else {}
        usable = 0 if needed else count
        return PoolTransferResult(usable, hits, list(range(1, usable + 1)))

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {transfer.name: self._v2(transfer, self.batch_get_v1, extra_info) for transfer in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {transfer.name: self._v2(transfer, self.batch_set_v1, extra_info) for transfer in transfers}

    def _v2(self, transfer: Any, move: Any, extra_info: Any) -> list[bool]:
        keys = transfer.keys or []
        if transfer.name != PoolName.KV:
            return [False] * len(keys)
        moved: list[bool] = move(keys, transfer.host_indices, extra_info)
        return moved

    # -- upkeep --------------------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Delete every page of this model and rank; whether all of it is gone."""
        return self._pages is not None and self._pages.clear()

    def get_stats(self) -> Any:
        """Transfers since the last call, as SGLang's own metrics; None where they are switched off."""
        if self._pages is None or not self._storage.enable_storage_metrics:
            return None
        try:
            from sglang.srt.observability.metrics_collector import StorageMetrics
        except ImportError:
            return None
        reads, writes = self._pages.take_moved()
        return StorageMetrics(
            prefetch_pgs=[each.pages for each in reads],
            backup_pgs=[each.pages for each in writes],
            prefetch_bandwidth=[_gigabytes_per_second(each) for each in reads],
            backup_bandwidth=[_gigabytes_per_second(each) for each in writes],
        )

    def counts(self) -> Mapping[str, int]:
        """Pages and calls by what became of them, since the start."""
        return {} if self._pages is None else self._pages.counts()


def _gigabytes_per_second(moved: Moved) -> float:
    return moved.bytes / 2**30 / max(moved.seconds, 1e-9)
