"""Translates SGLang's description of its pages: the owner of the KV, and what the bytes depend on."""

from __future__ import annotations

from typing import Any

from kvloom import KVSpec

from .settings import Geometry

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
    shared = bool(storage.is_mla_model)
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
    identity: dict[str, str | int] = {"pool": type(pool).__name__}
    identity |= {name: int(getattr(storage, name, 0)) for name in _RANKS}
    identity |= {name: str(getattr(pool, name, "")) for name in _SHAPES}
    return spec, Geometry(page_tokens=pool.page_size, page_elements=page.numel(), identity=identity)
