"""Settings of vLLM's own offloading, and the owner of its KV: from the attributes of vLLM's configurations."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from kvloom import ByteSize, Config, Duration, KVSpec, validated

from ..identity import check_cache_dtype
from ..revision import digest_of, name_of, plain_json, revision_of, text_config
from ..weights import folder_digest
from .settings import PieceGeometry

log = logging.getLogger(__name__)

_KEPT_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
_PLAIN_SPECULATION = ("ngram", "ngram_gpu", "suffix")


class OffloadSettings(Config):
    """kvloom's part of `kv_connector_extra_config`."""

    config: str | dict[str, Any]
    """The path of a YAML file, or what would be in it."""
    staging: ByteSize = Field(default=1 << 30, ge=1)
    """Bytes of slots, of all ranks together."""
    patience: Duration = 10.0
    """Maximum time that a request waits for KV that the tiers report."""

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> OffloadSettings:
        """Raises ConfigError, with each path of what cannot work. Other keys are vLLM's."""
        given = {name: extra[name] for name in cls.model_fields if name in extra}
        return validated(cls, given, at="kv_connector_extra_config", by_line=True)


def refuse(config: Any, offloading: Any) -> None:
    """ValueError, naming it, for what vLLM's hashes and the fingerprint do not cover. config: a `VllmConfig`."""
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    if not algorithm.startswith("sha256"):
        raise ValueError(f"prefix_caching_hash_algo {algorithm}: its hashes may collide; use sha256 or sha256_cbor")
    if getattr(config, "lora_config", None) is not None:
        raise ValueError("LoRA: vLLM's offloading knows adapters by name only; use KVLoomConnector, or no LoRA")
    method = getattr(getattr(config, "speculative_config", None), "method", None)
    if method is not None and method not in _PLAIN_SPECULATION:
        raise ValueError(f"speculative decoding with {method}: the draft model's KV depends on more than the tokens")
    dtype = str(config.cache_config.cache_dtype)
    if dtype not in _KEPT_DTYPES:
        raise ValueError(f"kv_cache_dtype {dtype}: not tested; use one of {', '.join(_KEPT_DTYPES)}")
    check_cache_dtype(config)
    if offloading.cache.blocks_per_chunk > 1 and len(offloading.groups) > 1:
        raise ValueError("blocks_per_chunk: must be 1 if the model has several groups of KV cache; remove it")


def told_by_worker(
    config: Any, offloading: Any, *, pages: Sequence[Sequence[int]], about: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of a rank's file, as JSON values. config: a `VllmConfig`; offloading: an `OffloadingConfig`.

    pages: the bytes of a block in each layer of each group. about: facts that only vLLM knows.
    """
    cache, model = config.cache_config, config.model_config
    return {
        "model": name_of(model),
        "revision": revision_of(model, config),
        "rope": plain_json(getattr(text_config(model), "rope_parameters", None) or {}),
        "layers": sum(len(group.layer_names) for group in offloading.groups),
        "quantization": "" if str(cache.cache_dtype) == "auto" else str(cache.cache_dtype),
        "identity": {
            "hash": str(cache.prefix_caching_hash_algo),
            "compute_dtype": str(model.dtype),
            "mamba": digest_of([str(getattr(cache, name, "")) for name in sorted(vars(cache)) if "mamba" in name]),
            **_shared(offloading),
            **about,
        },
        "pages": digest_of(
            [[list(group) for group in pages], [list(group.layer_names) for group in offloading.groups]]
        ),
    }


def described(told: Sequence[Mapping[str, Any]], *, slot_bytes: Sequence[int]) -> tuple[KVSpec, PieceGeometry]:
    """All ranks' KV as pieces. told: what each rank wrote. ValueError if they do not go together."""
    first = told[0]
    for rank, other in enumerate(told):
        if any(other[name] != first[name] for name in ("model", "revision", "identity")):
            raise ValueError(f"rank {rank} has another model or configuration than rank 0")
    spec = KVSpec(
        model=first["model"], revision=first["revision"], rope=first["rope"], num_layers=max(1, first["layers"]),
        num_kv_heads=1, head_size=1, dtype="uint8", kv_quantization=first["quantization"],
    )  # fmt: skip
    identity = {**first["identity"], "pages": [one["pages"] for one in told]}
    return spec, PieceGeometry(piece_bytes=list(slot_bytes), identity=identity)


def described_from_outside(
    offloading: Any, *, row_bytes: int, revision: str, about: Mapping[str, Any]
) -> tuple[KVSpec, PieceGeometry]:
    """The same where there is no `VllmConfig`. revision: which weights and overrides, as far as one says."""
    folder = Path(str(offloading.model.name)).expanduser()
    weights = f"weights {folder_digest(folder)}" if folder.is_dir() else ""
    if not weights and not revision:
        log.warning("%s is not a local folder: KV is identified by its name only; set `revision`", folder)
    spec = KVSpec(
        model=folder.name if weights else str(offloading.model.name),
        revision=", ".join(filter(None, (weights, revision))),
        num_layers=max(1, sum(len(group.layer_names) for group in offloading.groups)), num_kv_heads=1, head_size=1,
        dtype="uint8", kv_quantization=str(offloading.model.dtype),
    )  # fmt: skip
    identity = {**_shared(offloading), **about}
    return spec, PieceGeometry(piece_bytes=[row_bytes], identity=identity)


def _shared(offloading: Any) -> dict[str, str | int | bool | list[str]]:
    parallel = offloading.parallel
    return {
        "groups": [
            f"{group.group_id}: {len(group.layer_names)} layers, {group.tokens_per_block} tokens, "
            + hashlib.sha256("\n".join(group.layer_names).encode()).hexdigest()[:16]
            for group in offloading.groups
        ],
        "layout": str(offloading.kv_cache_layout),
        "hash_tokens": int(offloading.cache.tokens_per_hash),
        "chunk_blocks": int(offloading.cache.blocks_per_chunk),
        "ranks": " ".join(f"{name} {getattr(parallel, f'{name}_size')}" for name in ("tp", "pp", "pcp", "dcp")),
        "replicated": bool(offloading.replicated_layout),
        "canonical": bool(offloading.canonical_layout),
    }
