"""`KVLoomBlendConnector`: the class that vLLM loads. A thin layer over `scheduler` and `worker`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

from kvloom import check_config
from kvloom_connector_vllm import (
    PromMetrics,
    Stats,
    about_model,
    check_version,
    identify,
    layer_spec,
    page_order,
    pages_of,
)

from .orders import Orders, Prompt, Report
from .scheduler import Scheduler, boundaries_of
from .settings import Settings, refuse
from .twin import Pages, Twin
from .worker import Worker

log = init_logger("vllm.kvloom.blend")


class Metadata(KVConnectorMetadata):
    """From the scheduler's half to the worker's, each step."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders


class WorkerMetadata(KVConnectorWorkerMetadata):
    """From the worker's half to the scheduler's."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(Report({**self.report.found, **other.report.found}))


class KVLoomBlendConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Blends prompts with stored passages anywhere in them, with a twin of the model, into vLLM's own pages.

    `kv_connector_extra_config`: `config`, the path of a YAML file (or a mapping of the same shape) as
    `kvloom_blend.blended` takes it; `least_found`, the minimum share of a prompt that must be stored, default 0.5.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_version()
        self._settings = settings = Settings.read(self._kv_transfer_config.kv_connector_extra_config)
        refuse(vllm_config)
        about = about_model(vllm_config, layer_spec(kv_cache_config))
        self._identity = identify(vllm_config, kv_cache_config, rank=0, about=about)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler()
        else:
            model = vllm_config.model_config
            twin = Twin.load(
                model.model, settings.engine, device=torch.device(current_platform.device_type),
                dtype=model.dtype, revision=model.revision, code_revision=model.code_revision,
                trust_remote_code=model.trust_remote_code, cache_dir=vllm_config.load_config.download_dir,
            )  # fmt: skip
            twin.check(self._identity.spec)
            self._worker = Worker(twin, least_found=settings.least_found)

    @classmethod
    def check_settings(cls, extra: Mapping[str, Any]) -> None:
        """Raise ConfigError for a `kv_connector_extra_config` that cannot work, as far as it shows by itself."""
        check_config(Settings.read(extra).engine)

    # -- the scheduler's half ------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        if num_computed_tokens or not _can_be_blended(request, self._settings.min_tokens):
            return 0, False
        boundaries = boundaries_of(request.kv_transfer_params, len(request.prompt_token_ids))
        salt = request.cache_salt or None
        prompt = Prompt(request.request_id, request.prompt_token_ids, salt, boundaries)
        tokens = self._scheduler.matched(prompt)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        if num_external_tokens > 0:
            (ids,) = blocks.get_block_ids()
            self._scheduler.load(request.request_id, list(ids))

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        assert self._scheduler is not None
        return Metadata(self._scheduler.orders(idle=scheduler_output.total_num_scheduled_tokens == 0))

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        meta = connector_output.kv_connector_worker_meta
        if meta is not None:
            self._scheduler.report(meta.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._scheduler.end(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def reset_cache(self) -> bool:
        """vLLM's weights may have changed in place: the twin's have not. Nothing is blended any more."""
        assert self._scheduler is not None
        log.warning("caches were reset: nothing is blended until vLLM is started again")
        self._scheduler.stop()
        return True

    # -- the worker's half ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        if get_kv_transfer_group() is not self:
            raise ValueError(
                "KVLoomBlendConnector: inside another connector, which would store blended KV under exact "
                "keys. Make it the only one"
            )
        identity = self._identity
        layers = [extract_layer_index(name) for name in identity.layer_names]
        if layers != list(range(len(layers))):
            raise ValueError(f"KVLoomBlendConnector: layers {layers} have KV; those of the twin are numbered from 0")
        views = pages_of(kv_caches, identity, int(self._kv_cache_config.num_blocks))
        order = page_order(self._vllm_config, identity, kv_caches).to(views[0].device)
        self._worker.attach(Pages(views, order, identity.spec, identity.geometry))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        self._worker.begin(metadata.orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Blending is over before anything computes with it."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        return None, self._worker.finished() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.failed_blocks()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        assert self._worker is not None
        report = self._worker.report()
        return None if report is None else WorkerMetadata(report)

    def remember(self, tokens: list[int], salt: str | None = None) -> int:
        """Compute a passage alone and keep its KV; how many tokens that are. vLLM's worker waits for it."""
        assert self._worker is not None
        return self._worker.twin.remember(tokens, salt)

    # -- both ----------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Stats | None:
        data = self._worker.counts() if self._worker is not None else {}
        return Stats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _can_be_blended(request: Any, min_tokens: int) -> bool:
    """Return whether this is a prompt of plain tokens, for the unmodified model, of which only the continuation is
    wanted."""
    sampling = request.sampling_params
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and len(request.prompt_token_ids) >= max(min_tokens, 2)
        and not request.num_output_tokens  # it was preempted: what it has been given by now is its own
        and request.lora_request is None
        and not request.mm_features
        and not request.resumable
        and not request.skip_reading_prefix_cache  # vLLM would not take it; so it is with logprobs of prompts
        and sampling is not None
        and sampling.prompt_logprobs is None
        and _wanted(request.kv_transfer_params)
    )


def _wanted(params: Any) -> bool:
    """`"kvloom_blend": false` is how a client asks for what the model itself computes."""
    return not isinstance(params, dict) or params.get("kvloom_blend") is not False
