"""Translates SGLang's description of its pages: the owner of the KV, and what the bytes depend on."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kvloom import KVSpec

from .settings import Geometry

log = logging.getLogger("kvloom.connector_sglang")

_SERVER = (
    "context_length", "dtype", "json_model_override_args", "model_impl", "model_config_parser", "revision",
    "quantization", "modelopt_quant", "rl_quant_profile", "prefill_kv_cache_dequant_dtype",
    "mm_process_config", "image_processor_backend", "disable_fast_image_processor",
)  # fmt: skip
"""Settings of SGLang's that change the KV of the same tokens by more than its last bits."""
_RANKS = ("pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size")
_SHAPES = ("layout", "start_layer", "end_layer", "storage_format_tag")


def described(storage: Any, pool: Any, *, revision: str = "") -> tuple[KVSpec, Geometry]:
    """storage: a `HiCacheStorageConfig`. pool: its `HostKVCache`. revision: which weights, as far as one says.

    Raises ValueError for what kvloom cannot keep.
    """
    if not storage.model_name:
        raise ValueError("SGLang does not say which model it serves; start it with --served-model-name")
    try:
        page = pool.get_dummy_flat_data_page()
    except Exception as error:
        kind = f"{type(pool).__name__} of layout {getattr(pool, 'layout', '?')}"
        raise ValueError(f"{kind} does not hand out whole pages ({error}); use another --hicache-mem-layout") from error
    shared, server = bool(storage.is_mla_model), _server()
    spec = KVSpec(
        model=storage.model_name,
        revision=revision,
        num_layers=max(1, getattr(pool, "layer_num", 1)),
        num_kv_heads=max(1, getattr(pool, "head_num", None) or 1),
        head_size=max(1, getattr(pool, "head_dim", None) or page.numel()),
        dtype=str(page.dtype).removeprefix("torch."),
        kv_planes=1 if shared else 2,
        world_size=1 if shared else storage.tp_size,
        rank=0 if shared else storage.tp_rank,
    )
    identity: dict[str, str | int] = {"pool": type(pool).__name__, "kv_dtype": _kv_dtype(pool, page.dtype, server)}
    identity |= {name: int(getattr(storage, name, 0)) for name in _RANKS}
    identity |= {name: str(getattr(pool, name, "")) for name in _SHAPES}
    identity |= _said_by(server)
    return spec, Geometry(page_tokens=pool.page_size, page_elements=page.numel(), identity=identity)


def _server() -> Mapping[str, Any]:
    """The settings that this process's SGLang serves with; empty if they cannot be found."""
    context: Any = sys.modules.get("sglang.srt.runtime_context")  # a server has it
    try:
        return dict(context.get_context().resolved_server_args_dict())
    except Exception:
        _warn()
        return {}


@cache
def _warn() -> None:
    log.warning(
        "SGLang's own settings cannot be read: servers that differ in %s share KV, unless "
        "hicache_storage_backend_extra_config.revision says so",
        ", ".join(_SERVER),
    )


def _said_by(server: Mapping[str, Any]) -> dict[str, str | int]:
    """SGLang's version, and its settings as far as they are set."""
    try:
        said: dict[str, str | int] = {"sglang": metadata.version("sglang")}
    except metadata.PackageNotFoundError:
        said = {}
    said |= {name: str(server[name]) for name in _SERVER if server.get(name) not in (None, False, "", "{}", {})}
    scales = server.get("quantization_param_path")
    if scales:
        file = Path(str(scales))
        said["scales"] = hashlib.sha256(file.read_bytes()).hexdigest()[:32] if file.is_file() else str(scales)
    return said


def _kv_dtype(pool: Any, dtype: torch.dtype, server: Mapping[str, Any]) -> str:
    """The dtype of the KV, by the device's pool and by the server's setting if it has less than two bytes: then SGLang
    keeps bytes in the host's memory. ValueError if neither says more. dtype: that of the host's memory."""
    if dtype.itemsize > 1:
        return str(dtype).removeprefix("torch.")
    known = getattr(getattr(pool, "device_pool", None), "dtype", dtype)
    said = str(server.get("kv_cache_dtype") or "auto")
    names = [str(known).removeprefix("torch.")] if known != torch.uint8 else []
    if said != "auto":
        names.append(f"{said} of ROCm" if torch.version.hip else said)  # other numbers under the same name
    if not names:
        raise ValueError(
            "kv_cache_dtype: the host's memory holds bytes, and SGLang does not say of which dtype; "
            "start it with --kv-cache-dtype fp8_e4m3 or another one by name"
        )
    return " ".join(names)
