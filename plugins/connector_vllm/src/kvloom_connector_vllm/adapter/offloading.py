"""`KVLoomOffloadingSpec`: kvloom's tiers behind vLLM's own OffloadingConnector, for all groups of a hybrid model."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TransferResult,
    get_offload_group_idx,
)

from kvloom import ConfigError, EngineConfig, one_line

from ..offload.copy import Blocks, Copier, Order
from ..offload.setup import OffloadSettings, described, refuse, told_by_worker
from ..offload.store import OffloadStore
from ..offload.tiers import Found, Pace, Tiers
from ..paged.bounce import mark
from ..staging import Staging, staging_path
from . import platform

log = init_logger("vllm.kvloom")  # others are not printed

RESULTS = {
    Found.HIT: LookupResult.HIT,
    Found.COMING: LookupResult.HIT_PENDING,
    Found.ASKED: LookupResult.RETRY,
    Found.MISS: LookupResult.MISS,
}
_STARTING_SECONDS = 30.0
_T = TypeVar("_T")


class Places(LoadStoreSpec):
    """The slots of a job; sent from the scheduler to every worker."""

    def __init__(self, order: Order) -> None:
        self.order = order


class KVLoomOffloadingSpec(OffloadingSpec):
    """`kv_connector_extra_config`: `config`, a YAML file; `staging`, bytes of shared memory; `patience`, seconds."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        platform.log_as_vllm_does()
        platform.check_version()
        self._settings = OffloadSettings.read(self.extra_config)
        self._engine = EngineConfig.load(self._settings.config)
        self._vllm_config = get_current_vllm_config_or_none()  # the workers have it
        if self._vllm_config is not None:
            refuse(self._vllm_config, config)
            platform.check_prefixes(self._vllm_config)
        self._manager: KVLoomManager | None = None
        self._worker: KVLoomWorker | None = None

    def get_manager(self) -> KVLoomManager:
        if self._manager is None:
            ranks = [self._opened(rank) for rank in range(self.config.parallel.world_size)]
            try:
                spec, geometry = described(
                    [rank.about for rank in ranks], slot_bytes=[rank.slot_bytes for rank in ranks]
                )
                tiers = Tiers(self._engine, spec, geometry)
            finally:
                for rank in ranks:
                    rank.unlink()
            indices = {group.group_id: index for index, group in enumerate(self.config.groups)}
            store = OffloadStore(
                tiers, ranks, group=lambda key: indices[get_offload_group_idx(key)], patience=self._settings.patience
            )
            self._manager = KVLoomManager(store)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> KVLoomWorker:
        if self._worker is None:
            if self._vllm_config is None:
                raise RuntimeError("vLLM does not say how it is configured; kvloom is tested with vLLM 0.32 and 0.33")
            self._worker = KVLoomWorker(*self._staged(kv_caches))
        return self._worker

    def _staged(self, kv_caches: CanonicalKVCaches) -> tuple[Copier, torch.device]:
        """This rank's file, and what copies into it."""
        groups = [
            [_pages(kv_caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        sizes = [[page.shape[1] for page in pages] for pages in groups]
        slot_bytes = self.blocks_per_chunk * max(map(sum, sizes))
        parallel = self.config.parallel
        slots = self._settings.staging // parallel.world_size // slot_bytes
        if not slots:
            least = parallel.world_size * slot_bytes
            text = f"{self._settings.staging} bytes are less than one chunk of all ranks; at least {least}"
            raise ConfigError("kv_connector_extra_config.staging", text)
        told = told_by_worker(
            self._vllm_config, self.config, pages=sizes, about=_about(self._vllm_config, self.config.groups)
        )
        path = staging_path(self.config.engine_id, parallel.rank)
        staging = Staging.create(path, slots=slots, slot_bytes=slot_bytes, about=told)
        log.info("kvloom: %d slots of %d bytes for rank %d", slots, slot_bytes, parallel.rank)
        copier = Copier(staging, groups, chunk_blocks=self.blocks_per_chunk, rank=parallel.rank)
        return copier, kv_caches.tensors[0].tensor.device

    def _opened(self, rank: int) -> Staging:
        """The file that a worker made: vLLM starts them first."""
        path, until = staging_path(self.config.engine_id, rank), time.monotonic() + _STARTING_SECONDS
        while True:
            try:
                return Staging.open(path)
            except FileNotFoundError:
                if time.monotonic() > until:
                    text = f"the worker of rank {rank} has made no {path}: all ranks must be on the scheduler's machine"
                    raise RuntimeError(text) from None
                time.sleep(0.05)


class KVLoomManager(OffloadingManager):
    """The scheduler's half. Nothing raises, except a load of a chunk that was never a hit."""

    def __init__(self, store: OffloadStore) -> None:
        self.store = store

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not req_context.load_tier_filter.allows(None, None):
            return LookupResult.MISS
        found = forgiving(lambda: self.store.lookup(key, req_context.req_id), Found.MISS)
        return RESULTS[found]

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Places:
        return Places(self.store.prepare_load(list(keys)))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        forgiving(lambda: self.store.complete_load(list(keys)), None)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        def position(key: bytes) -> int:
            return req_context.get_offload_key_position(OffloadKey(key)) or 0

        prepared = forgiving(lambda: self.store.prepare_store(list(keys), position), None)
        if prepared is None:
            return None
        accepted, order = prepared
        return PrepareStoreOutput([OffloadKey(key) for key in accepted], Places(order), [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        forgiving(lambda: self.store.complete_store(list(keys), success=success), None)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        forgiving(lambda: self.store.end_request(req_context.req_id), None)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        forgiving(self.store.end_step, None)

    def reset_cache(self) -> None:
        forgiving(self.store.reset, None)

    def shutdown(self) -> None:
        forgiving(self.store.close, None)
        log.info("kvloom: %s", ", ".join(f"{count} {what}" for what, count in sorted(self.store.counts().items())))


class KVLoomWorker(OffloadingWorker):
    """In a worker: copies, in order, on a thread beside the engine's; loads that a step waits for on another."""

    def __init__(self, copier: Copier, device: torch.device) -> None:
        self._copier = copier
        self._device = device
        self._thread = ThreadPoolExecutor(1, "kvloom-offload-copy")
        self._expedited = ThreadPoolExecutor(1, "kvloom-offload-expedited")
        self._jobs: dict[int, Future[tuple[int, float]]] = {}
        self._pace = Pace()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(self._thread, job_id, self._copier.store, dst_spec, src_spec)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """expedited: the step waits for it, so that it comes before loads that were submitted earlier (since 0.33)."""
        thread = self._expedited if expedited else self._thread
        return self._submit(thread, job_id, self._copier.load, src_spec, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        self._pace(self._jobs.values())
        done = [job for job, future in self._jobs.items() if future.done()]
        return [self._result(job, self._jobs.pop(job)) for job in done]

    def wait(self, job_ids: set[int]) -> None:
        for job in job_ids & self._jobs.keys():
            self._jobs[job].exception()

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._expedited.shutdown()
        self._copier.close()

    def _submit(
        self, thread: ThreadPoolExecutor, job: int, copy: Callable[..., int], places: LoadStoreSpec,
        blocks: GPULoadStoreSpec,
    ) -> bool:  # fmt: skip
        assert isinstance(places, Places)
        whole = Blocks(blocks.block_ids.tolist(), blocks.group_sizes, blocks.block_indices)
        self._copier.expect(places.order)
        self._jobs[job] = thread.submit(_timed, copy, places.order, whole, mark(self._device))
        return True

    def _result(self, job: int, future: Future[tuple[int, float]]) -> TransferResult:
        error = future.exception()
        if error is not None:  # of a load: vLLM ends the engine, rather than go on with blocks that are not filled
            log.error("a load has failed after it was promised: %s: %s", type(error).__name__, one_line(error))
            return TransferResult(job, False)
        return TransferResult(job, True, *future.result())


def _timed(copy: Callable[..., int], *given: Any) -> tuple[int, float]:
    """Bytes and seconds."""
    began = time.monotonic()
    return copy(*given), time.monotonic() - began


def forgiving(work: Callable[[], _T], otherwise: _T) -> _T:
    """Nothing that goes wrong here may end the engine's threads."""
    try:
        return work()
    except Exception:
        log.exception("kvloom: taken as a miss")
        return otherwise


def _pages(tensor: torch.Tensor, page_bytes: int) -> torch.Tensor:
    if tensor.dim() != 2 or tensor.element_size() != 1 or tensor.stride(1) != 1:
        raise ValueError(f"pages {list(tensor.shape)} of {tensor.dtype}: expected [blocks, bytes], each in one piece")
    return tensor.view(torch.uint8)[:, :page_bytes]


def _about(config: Any, groups: Sequence[Any]) -> dict[str, str | int | bool]:
    """Everything that the bytes of the groups' layers depend on, besides their sizes."""
    layers = config.compilation_config.static_forward_context
    found: dict[str, set[str]] = {}
    for group in groups:
        for name in group.layer_names:
            layer = layers[name]
            form = SimpleNamespace(
                dtype=getattr(layer, "kv_cache_torch_dtype", config.model_config.dtype),
                block_size=group.tokens_per_block,
                head_size=getattr(layer, "head_size", 0),
            )
            backend = layer.get_attn_backend().get_name()
            facts = {"kernel": backend, "layer": type(layer).__name__, "kv": str(form.dtype)}
            facts["window"] = str(getattr(layer, "sliding_window", None))
            for fact, value in {**facts, **platform.about_model(config, form)}.items():
                found.setdefault(fact, set()).add(str(value))
    return {fact: " ".join(sorted(values)) for fact, values in found.items()}
