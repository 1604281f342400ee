"""`KVLoomTier`: kvloom's tiers below the host memory of vLLM's TieringOffloadingSpec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import vllm
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvloom import EngineConfig

from ..offload.rows import Done, RowStore
from ..offload.setup import OffloadSettings, described_from_outside
from ..offload.tiers import Found, Tiers
from . import platform
from .offloading import RESULTS, forgiving

log = init_logger("vllm.kvloom")  # others are not printed


class KVLoomTier(SecondaryTierManager):
    """One of `secondary_tiers`: `{"type": "KVLoomTier", "module_path": "kvloom_connector_vllm.adapter.secondary", ...}`

    config: the path of a YAML file. revision: which weights, overrides and attention backend, for vLLM does not say
    them here: whatever changes them has to change it. patience: seconds that a request waits for the tiers at most.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, *, config: Any, revision: str = "",
        patience: Any = 10.0, locality: str | None = None, backpressure_detector: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        platform.log_as_vllm_does()
        platform.check_version()
        self.locality = Locality(locality) if locality is not None else None
        settings = OffloadSettings.read({"config": config, "patience": patience})
        spec, geometry = described_from_outside(
            offloading_spec.config, row_bytes=self.block_size_bytes, revision=revision, about=_about()
        )
        tiers = Tiers(EngineConfig.load(settings.config), spec, geometry)
        self.store = RowStore(tiers, primary_kv_view, patience=settings.patience)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return RESULTS[forgiving(lambda: self.store.lookup(key, req_context.req_id), Found.MISS)]

    def submit_store(self, job_metadata: TransferJob) -> None:
        self.store.store(job_metadata.job_id, *_rows(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self.store.load(job_metadata.job_id, *_rows(job_metadata), job_metadata.req_context.req_id)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [_result(done) for done in self.store.finished()]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        forgiving(lambda: self.store.end_request(req_context.req_id), None)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        forgiving(self.store.end_step, None)

    def drain_jobs(self) -> None:
        self.store.drain()

    def shutdown(self) -> None:
        forgiving(self.store.close, None)


def _rows(job: TransferJob) -> tuple[list[bytes], list[int]]:
    return list(job.keys), [int(row) for row in job.chunk_ids]


def _result(done: Done) -> JobResult:
    keys = tuple(OffloadKey(key) for key in done.keys)
    return JobResult(done.job, done.complete, None if done.complete else keys or None, done.seconds, done.bytes)


def _about() -> dict[str, str]:
    found = {"vllm": vllm.__version__, "platform": str(current_platform.device_type)}
    if current_platform.is_cpu():
        found["isa"] = torch.backends.cpu.get_cpu_capability()
    seed = platform._hash_seed()
    return {**found, "hash_seed": seed} if seed else found
