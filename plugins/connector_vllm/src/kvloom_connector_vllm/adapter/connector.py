"""`KVLoomConnector`: the class that vLLM loads. A thin layer over `scheduler` and `worker`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from kvloom import Engine, check_config

from .. import identity as identities
from ..configured import Settings, has_shared_tier
from ..names import Names, owner_of
from ..paged.views import orders_of_parts, pages_of
from ..scheduling.announcing import Announcer
from ..scheduling.messages import Orders, Report
from ..scheduling.plan import Boundary, Owner, Scheduled
from ..scheduling.planner import Planner
from ..scheduling.scheduler import MEMORY, Scheduler, patience_of
from ..transfers import Part
from ..worker import Worker
from . import platform
from .events import events_of
from .metrics import PromMetrics, Stats
from .order import page_order

log = init_logger("vllm.kvloom")  # others are not printed

_COUNT_SECONDS = 1.0
_WORKERS: WeakSet[Worker] = WeakSet()
"""Those of this process."""


class Metadata(KVConnectorMetadata):
    """From the scheduler's half to every worker, each step."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders


class WorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler's half; vLLM puts those of all ranks together."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.report.add(other.report))


class Handshake(KVConnectorHandshakeMetadata):
    """From each worker to the scheduler's half at start-up: how it calls its KV, which depends on its layers."""

    def __init__(self, names: Sequence[Sequence[Names]]) -> None:
        self.names = names


class KVLoomConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """KV that outlives the process, verified before it is used.

    `kv_connector_extra_config`: `config`, the path of a YAML file (or a mapping of the same shape); `async_load`, true
    unless it says otherwise: requests wait for their KV while others compute. Without it, `by_layer`: a step computes
    each layer as soon as its KV is there.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        platform.log_as_vllm_does()
        platform.check_version()
        platform.check_prefixes(vllm_config)
        transfer = self._kv_transfer_config
        parallel = vllm_config.parallel_config
        self._heads, self._stages = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
        self._stage, self._rank = platform.place() if role == KVConnectorRole.WORKER else (0, 0)
        extra = transfer.kv_connector_extra_config
        self._settings = settings = Settings.read(extra, ranks=self._heads * self._stages)
        self._identities = identities.identify_groups(
            vllm_config, kv_cache_config, rank=self._rank, about=partial(platform.about_model, vllm_config),
            pages=settings.pages, shards=settings.shards,
        )  # fmt: skip
        self._groups = settings.groups(self._identities)
        order = tuple(one.group for one in self._identities)
        self._order = None if order == tuple(range(len(order))) else order
        self._config = settings.engine
        self._adapters = identities.Adapters()
        self._layer_numbers = {name: number for number, name in enumerate(self._identities[0].layer_names)}
        """Numbers of the layers of the only group, for loads by layer."""
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._stats_due = 0.0
        self._handled: BaseException | None = None
        """The exception that the engine's caller was handling when the step began."""
        self._produces, self._consumes = bool(transfer.is_kv_producer), bool(transfer.is_kv_consumer)
        if role == KVConnectorRole.SCHEDULER:
            if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
                log.warning(
                    "kv_load_failure_policy is %r: a request whose KV cannot be read is ended with an error. "
                    'Put "kv_load_failure_policy": "recompute" into --kv-transfer-config, and it is computed instead.',
                    transfer.kv_load_failure_policy,
                )
            if self._stages == 1:
                self._scheduler = self._open_scheduler([self._names(rank) for rank in range(self._heads)])
        else:
            self._worker = self._open_worker()
            _WORKERS.add(self._worker)

    def _open_scheduler(self, ranks: Sequence[Sequence[Sequence[Names]]]) -> Scheduler:
        config, hash_tokens = self._config, self._identities[0].hash_tokens
        opened = self._settings.opened(self._identities[0].geometry)
        index = Engine.open(opened, self._identities[0].spec, role="index") if has_shared_tier(config) else None
        planner = Planner(
            self._groups, hash_tokens=hash_tokens, save_generated=config.save_decode_cache, tails=config.save_tails,
            save=self._produces,
        )  # fmt: skip
        events = self._vllm_config.kv_events_config
        announcer = None
        if events is not None and events.enable_kv_cache_events:
            announcer = Announcer(chunk_tokens=self._groups[0].chunk_tokens, hash_tokens=hash_tokens)
        return Scheduler(planner, ranks, index, announcer, asynchronous=self._settings.async_load)

    def _open_worker(self) -> Worker:
        there = [one for one in self._identities if one.layer_names]
        largest = max(there, key=lambda one: one.geometry.layers * one.geometry.page_elements)
        # One rank keeps on a tier that all share what all ranks of its stage compute alike; on several hosts a tier
        # may be each host's own.
        parallel = self._vllm_config.parallel_config
        here = int(getattr(parallel, "nnodes", 1)) == 1 and parallel.distributed_executor_backend != "ray"
        stores = not here or self._rank == 0 or not all(one.spec.replicated for one in there)
        opened = partial(self._settings.opened, stores=stores)
        first = Engine.open(opened(largest.geometry), largest.spec)
        parts: list[list[Part]] = []
        for identity, group, names in zip(self._identities, self._groups, self._names(self._rank), strict=True):
            parts.append([])
            for spec, name in zip(identity.of_rank(self._rank), names, strict=True):
                known = spec == first.spec and identity is largest
                engine = first if known else first.sibling(spec, opened(identity.geometry))
                log.info(
                    "kvloom: chunks of %d tokens, tiers %s, fingerprint %s, rank %d",
                    group.chunk_tokens, ", ".join(first.tiers), engine.fingerprint, self._number,
                )  # fmt: skip
                parts[-1].append(Part(engine, name, group.block_tokens))
        return Worker(
            parts, rank=self._number, asynchronous=self._settings.async_load,
            by_request=self._settings.by_request(self._identities), by_layer=self._by_layer(),
            written_first=platform.written_first(self._vllm_config, self._kv_cache_config),
        )  # fmt: skip

    @property
    def _number(self) -> int:
        """The worker's among all ranks of the engine."""
        return self._stage * self._heads + self._rank

    def _by_layer(self) -> bool:
        if self._settings.by_layer and self._vllm_config.speculative_config is not None:
            log.warning("by_layer: a model that drafts begins when a step's loads have been told of; loads are whole")
            return False
        return self._settings.by_layer

    def _names(self, rank: int) -> list[list[Names]]:
        """By group and part, of a rank with the same layers."""
        format = self._settings.connector.format
        return [
            [Names(spec, one.geometry, format, chunk_tokens=group.chunk_tokens) for spec in one.of_rank(rank)]
            for one, group in zip(self._identities, self._groups, strict=True)
        ]

    # -- the scheduler's half ------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """With pipeline parallelism only the stages themselves know their layers. Called before the first request."""
        if self._stages > 1:
            if not all(isinstance(shake, Handshake) for shake in metadata.values()):
                raise ValueError(
                    "MultiConnector hands on what one of its connectors says at start-up, and with pipeline "
                    "parallelism kvloom needs its own: write KVLoomConnector first, beside connectors that say nothing"
                )
            self._scheduler = self._open_scheduler([shake.names for _, shake in sorted(metadata.items())])

    def on_new_request(self, request: Any) -> None:
        assert self._scheduler is not None
        owner = self._owner(request)
        if owner is not None:
            self._scheduler.begin(request, owner)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        owner = self._owner(request)
        if owner is None:
            self._scheduler.end(request.request_id)  # its adapter may have been known when it came
            return 0, False
        if not self._consumes or getattr(request, "skip_reading_prefix_cache", False):
            self._scheduler.begin(request, owner, num_computed_tokens)
            return 0, False
        patience = patience_of(getattr(request, "kv_transfer_params", None))
        tokens = self._scheduler.matched(request, owner, num_computed_tokens, patience=patience)
        return tokens, bool(tokens) and self._settings.async_load

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """By vLLM's own words for where KV was: in this host's memory, or on a tier that is shared."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        assert self._scheduler is not None
        found: dict[Any, int] = {}
        for tier, tokens in self._scheduler.sources.get(request.request_id, {}).items():
            source = CacheHitSource.HOST if tier == MEMORY else CacheHitSource.EXTERNAL_UNSPECIFIED
            found[source] = found.get(source, 0) + tokens
        return found if sum(found.values()) == num_external_tokens else {self._cache_hit_source: num_external_tokens}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        if num_external_tokens > 0:
            self._scheduler.load(request, self._by_group(blocks.get_block_ids()), num_external_tokens)
        elif not request.num_computed_tokens:  # else nobody was asked
            self._scheduler.give(request.request_id, self._by_group(blocks.get_block_ids()))

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        assert self._scheduler is not None
        idle = scheduler_output.total_num_scheduled_tokens == 0
        boundaries = self._boundaries(getattr(scheduler_output, "kv_connector_block_state", None))
        # Also those of a request that was preempted in the step that gave them to it.
        zeroed = getattr(scheduler_output, "new_block_ids_to_zero", None) or ()
        awaits_loads = getattr(scheduler_output, "has_sync_kv_loads", True)
        return Metadata(
            self._scheduler.orders(
                list(self._scheduled(scheduler_output)), boundaries, zeroed, idle=idle, awaits_loads=awaits_loads
            )
        )

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        meta = connector_output.kv_connector_worker_meta
        if meta is not None:
            failed = bool(connector_output.invalid_block_ids or connector_output.failed_recving)
            self._scheduler.report(meta.report, failed=failed)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._scheduler.end(request.request_id, self._by_group(block_ids))
        return False, None

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # unsaved KV is computed again

    def has_pending_push_work(self) -> bool:
        """Keep steps running until the scheduler knows about finished saves, so that the next request finds them."""
        return self._scheduler is not None and self._scheduler.busy

    def reset_cache(self) -> bool:
        assert self._scheduler is not None
        self._scheduler.clear()
        for worker in _WORKERS:  # an engine in this process may sleep before its next step, and that overwrites its KV
            worker.end_saves()
        return True

    # -- the worker's half ---------------------------------------------------------------------------------------------

    def get_handshake_metadata(self) -> Handshake | None:
        return Handshake(self._names(self._rank)) if self._stages > 1 else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        for group, identity in enumerate(self._identities):
            if not identity.layer_names:
                continue
            pages = pages_of(kv_caches, identity, int(self._kv_cache_config.num_blocks))
            orders = None
            if not self._settings.pages:
                order = page_order(self._vllm_config, identity, kv_caches).to(pages[0].device)
                orders = orders_of_parts(order, identity)
            self._worker.attach(pages, orders=orders, group=group)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True

    def unregister_kv_caches(self) -> None:
        """The engine is about to sleep (since 0.33): nothing reads its KV any more. Memory and tiers keep theirs."""
        assert self._worker is not None
        self._worker.end_transfers()

    def restore_kv_caches(self) -> None:
        """The engine is awake: its tensors are where they were, and vLLM does not use what they held."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert self._worker is not None and isinstance(kv_connector_metadata, Metadata)
        self._worker.fence(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert self._worker is not None and isinstance(connector_metadata, Metadata)
        self._handled = sys.exc_info()[1]
        self._worker.begin(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.load(wait=not self._settings.async_load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """By layers, what is computed from here on comes after this layer's loads. Else they are over already."""
        if self._settings.by_layer:
            assert self._worker is not None
            self._worker.wait_for_layer(self._layer_numbers.get(layer_name))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        return bool(extra_config.get("by_layer", False))  # else a graph replays the layers without their waits

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves begin when the whole step has been computed: nothing is in the way of computing it."""

    def wait_for_save(self) -> None:
        """vLLM calls this also on the way out of a step that raised: out of memory, say, or because a rank has died."""
        assert self._worker is not None
        before, self._handled = self._handled, None
        self._worker.save(computed=sys.exc_info()[1] is before)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        return None, self._worker.finished() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._worker.failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.failed_blocks()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        assert self._worker is not None
        report = self._worker.report()
        return None if report is None else WorkerMetadata(report)

    # -- both ----------------------------------------------------------------------------------------------------------

    @classmethod
    def check_settings(cls, extra: Mapping[str, Any]) -> None:
        """Raise ConfigError for a `kv_connector_extra_config` that cannot work, as far as it shows by itself."""
        check_config(Settings.read(extra, ranks=1).engine)

    def get_kv_connector_stats(self) -> Stats | None:
        now = time.monotonic()
        if now < self._stats_due:
            return None
        self._stats_due = now + _COUNT_SECONDS
        if self._worker is not None:
            data = self._worker.counts()
        else:
            assert self._scheduler is not None
            data = {f"{name}||": [count, 0, 0, 0, 0] for name, count in self._scheduler.taken().items()}
        return Stats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def take_events(self) -> Iterable[Any]:
        assert self._scheduler is not None
        return events_of(self._scheduler.announcements(), self._identities[0].hash_tokens)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    def _owner(self, request: Any) -> Owner | None:
        """The owner of a request's KV; None for an adapter whose weights cannot be identified."""
        adapter = self._adapters.of(request.lora_request)
        return None if adapter is None else owner_of(adapter, request.cache_salt or self._config.salt)

    def _by_group(self, tables: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """vLLM's block tables in the order of our groups."""
        return tables if self._order is None or not tables else [tables[group] for group in self._order]

    def _scheduled(self, output: Any) -> Iterator[Scheduled]:
        """A SchedulerOutput's entries by request; drafts of speculative decoding do not count."""
        tokens, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens

        def after(request: str, computed: int) -> int:
            return int(computed + tokens[request] - len(drafts.get(request, ())))

        for new in output.scheduled_new_reqs:
            computed = new.num_computed_tokens
            yield Scheduled(
                new.req_id, self._by_group(new.block_ids), True, computed, after(new.req_id, computed)
            )  # fmt: skip
        running = output.scheduled_cached_reqs
        for request, blocks, computed in zip(
            running.req_ids, running.new_block_ids, running.num_computed_tokens, strict=True
        ):
            fresh = request in running.resumed_req_ids
            yield Scheduled(request, self._by_group(blocks or ()), fresh, computed, after(request, computed))

    def _boundaries(self, blocks: Any) -> Iterator[Boundary]:
        """The states of a KVConnectorBlockState."""
        if blocks is not None and blocks.boundary_state_offloads:
            ours = {one.group: number for number, one in enumerate(self._identities)}
            for request, states in blocks.boundary_state_offloads.items():
                for group, block, tokens in states:
                    yield Boundary(request, ours[group], block, tokens)
