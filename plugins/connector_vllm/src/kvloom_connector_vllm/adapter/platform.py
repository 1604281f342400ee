"""Facts that only vLLM knows: its version, the platform, and the page layouts of its attention kernels."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform

TESTED = ((0, 32), (0, 34))
"""At least, and below: the versions that the tests run with."""


def about_model(config: Any, layer: Any) -> dict[str, str | int | bool]:
    """Part of the fingerprint: pages are opaque, and another version or instruction set may lay them out otherwise."""
    found: dict[str, str | int | bool] = {"vllm": vllm.__version__, "platform": str(current_platform.device_type)}
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    found["backend"] = str(getattr(backend, "name", backend))
    if not hasattr(layer, "head_size"):
        found["states"] = _state_layout()
    elif current_platform.is_cpu():
        found["isa"] = isa_of(config, layer.dtype, layer.block_size, layer.head_size)
    seed = _hash_seed()
    if seed:
        found["hash_seed"] = seed
    return found


def _state_layout() -> str:
    """The order of a convolution's state, which is square where its shape says nothing."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return "dim first" if is_conv_state_dim_first() else "dim last"


def log_as_vllm_does() -> None:
    """Send this package's log to where vLLM's goes."""
    ours = logging.getLogger("kvloom_connector_vllm")
    if not ours.handlers:
        ours.handlers = logging.getLogger("vllm").handlers[:]
        ours.setLevel(logging.INFO)


def check_version() -> None:
    """Warn about a vLLM that the tests do not run with."""
    try:
        version = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    except ValueError:
        version = (0, 0)
    if not TESTED[0] <= version < TESTED[1]:
        low, high = (".".join(map(str, one)) for one in TESTED)
        warnings.warn(f"kvloom is tested with vLLM from {low} to below {high}, not {vllm.__version__}", stacklevel=2)


def divided(config: Any, specs: dict[str, Any], memory_bytes: int) -> Any:
    """The KVCacheConfig of one rank that has layers with these specifications, by vLLM's own rules."""
    try:
        from vllm.v1.core import kv_cache_planning as planning  # since 0.33
    except ImportError:
        from vllm.v1.core import kv_cache_utils as planning
    groups = getattr(planning, "get_global_kv_cache_groups", None)
    more = () if groups is None else (groups(config, [specs]),)
    return planning.get_kv_cache_configs(config, [specs], [memory_bytes], *more)[0]


def place() -> tuple[int, int]:
    """The stage of a pipeline that this worker is in, and its rank there."""
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    return int(get_pp_group().rank_in_group), int(get_tensor_model_parallel_rank())


def check_prefixes(config: Any) -> None:
    """Raise ValueError where vLLM's kernels do not attend to what an earlier step has computed: a hit would be answered
    wrong, and vLLM turns its own prefix cache off, too."""
    off = not (config.scheduler_config.enable_chunked_prefill or config.cache_config.enable_prefix_caching)
    if off and current_platform.is_cpu() and config.model_config.use_mla:
        raise ValueError(
            "latents (MLA) on a processor without AMX: vLLM's kernel does not attend to tokens of an earlier step, so "
            "that vLLM has no prefix cache of its own; remove --kv-transfer-config"
        )


def written_first(config: Any, kv_cache_config: Any) -> bool:
    """Return whether vLLM writes to the blocks that a step gives away before it tells the worker's half of the step.

    The V2 model runner does: it sets blocks to zero and copies states first, where layers have states.
    """
    zeroed = getattr(kv_cache_config, "needs_kv_cache_zeroing", True)
    return bool(zeroed and getattr(config, "use_v2_model_runner", True))


def isa_of(config: Any, dtype: torch.dtype, block_tokens: int, head_size: int) -> str:
    """The kernel that vLLM uses on this processor; each has its own page layout."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return str(_get_attn_isa(dtype, block_tokens, head_size, config.cache_config.cache_dtype))
    except ImportError:
        return torch.backends.cpu.get_cpu_capability()


def _hash_seed() -> str:
    try:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED, resolve_none_hash_seed

        seed = resolve_none_hash_seed(sha256)
        return "" if seed == DEFAULT_NONE_HASH_SEED else seed
    except ImportError:
        import os

        return os.environ.get("PYTHONHASHSEED", "")
