"""Sizes of a model's KV by group, as vLLM divides its layers: `python -m kvloom_connector_vllm.adapter.footprint`.

Makes the model without memory for its weights, so that a large one takes no more than a small one. For `kvloom plan`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvloom import ConfigError

from ..configured import Settings
from ..identity import Identity, identify_groups
from ..scheduling.plan import Group
from . import platform

_MEMORY_BYTES = 1 << 46
"""The engine's memory for KV, of which nothing is allocated: enough for one sequence of any model."""


def footprint(model: str, file: str, dtype: str | None = None) -> list[dict[str, Any]]:
    """By group: its kind, the spec and geometry of a chunk's part, the parts, and tokens by block and chunk.

    file: the configuration, of whose connector only the kind is read. dtype: the model's, unless vLLM should choose.
    ValueError, naming it, for a model or setting that `KVLoomConnector` refuses.
    """
    config, known = _divided(model, file, dtype)
    settings = Settings.read({"config": file}, ranks=1)
    identities = identify_groups(
        config, known, rank=0, about=lambda layer: {}, pages=settings.pages, shards=settings.shards
    )
    return [_row(one, group) for one, group in zip(identities, settings.groups(identities), strict=True)]


def _row(identity: Identity, group: Group) -> dict[str, Any]:
    kind = "latents" if identity.spec.kv_planes == 1 else "full attention"
    if group.window or group.span:
        kind = f"window of {group.window} tokens" if group.window else f"local attention to {group.span} tokens"
    return {
        "kind": "states" if group.state else kind, "state": group.state, "parts": identity.shards,
        "layers": len(identity.layer_names), "block_tokens": group.block_tokens, "chunk_tokens": group.chunk_tokens,
        "page_bytes": identity.page_elements * identity.spec.torch_dtype.itemsize,
        "spec": dataclasses.asdict(identity.spec), "geometry": identity.geometry.model_dump(mode="json"),
    }  # fmt: skip


def _divided(model: str, file: str, dtype: str | None) -> tuple[Any, Any]:
    """A VllmConfig and its KVCacheConfig, as a server with kvloom has them on one rank."""
    from vllm.config import KVTransferConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

    transfer = KVTransferConfig(
        kv_connector="KVLoomConnector", kv_role="kv_both", kv_connector_module_path=__package__,
        kv_connector_extra_config={"config": file},
    )  # fmt: skip
    config = EngineArgs(
        model, dtype=dtype or "auto", load_format="dummy", enforce_eager=True, skip_tokenizer_init=True,
        kv_transfer_config=transfer, enable_prefix_caching=True, mamba_cache_mode="align",
    ).create_engine_config()  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rank", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        if config.model_config.is_attention_free:  # as with --block-size, which vLLM needs for such a model
            config.cache_config.mamba_block_size = config.cache_config.block_size
        register_all_kvcache_specs(config)
        runner: Any = SimpleNamespace(vllm_config=config, shared_kv_cache_layers={})
        specs = GPUModelRunner.get_kv_cache_spec(runner)
        resolve_kv_cache_layout(config, [WorkerBase.get_supported_kv_cache_layouts(runner)], specs.values())
        one = platform.divided(config, specs, _MEMORY_BYTES)
        _, one.hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(one, config)
    return config, one


def main(arguments: Sequence[str]) -> None:
    """Write the groups to the file OUT, or the reason why there are none: `MODEL FILE OUT [DTYPE]`."""
    model, file, out, *dtype = arguments
    try:
        said: dict[str, Any] = {"groups": footprint(model, file, *dtype)}
    except ConfigError as error:
        said = {"error": str(error)}
    except Exception as error:  # of whatever in vLLM does not take the model
        said = {"error": f"{type(error).__name__}: {error}"}
    Path(out).write_text(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1:])
