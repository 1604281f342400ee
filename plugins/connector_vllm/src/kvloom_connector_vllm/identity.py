"""Derives the owner of the KV and the shape of its pages from vLLM's configuration, by its attributes; vLLM is not

Settings that are not known to be safe are refused here, by name, before anything runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvloom import KVSpec, one_line

from .paged.settings import Geometry
from .revision import digest_of, name_of, plain_json, revision_of, text_config
from .weights import file_digest, folder_digest, versions

log = logging.getLogger(__name__)

_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOW = "SlidingWindowSpec"
_LOCAL = "ChunkedLocalAttentionSpec"
_STATE = "MambaSpec"
_CONTENT = ("head_size_v", "num_head_slots", "state_content_bytes", "tokens_per_state")
"""Attributes of a layer's specification that attention backends may change."""
_SLOTS = "num_head_slots"
"""The one of these that depends on the number of ranks."""
_DRAFTS = {"ngram", "ngram_gpu", "suffix", "draft_model"}
"""Methods of speculation whose drafts have no KV, or KV that depends on the tokens before it alone."""
_STATES = ("mamba_type", "shapes", "dtypes", "num_heads", "block_size")
"""Everything that the bytes of a state depend on."""
_OFFLOADING = "for others use vLLM's OffloadingConnector with kvloom's spec (docs/use/vllm.md)"
_BLOCK_IN_ONE_PIECE = {"LBHNC", "LBNHC", "BLHNC", "BLNHC"}
_PLAIN_QUANTISATION = {"NONE", "FP8_PER_TENSOR"}
_FLOATS = {"float16", "bfloat16", "float32"}


@dataclass(frozen=True, slots=True)
class Identity:
    """One rank's KV of one group of layers."""

    spec: KVSpec
    """Of the first of its parts."""
    geometry: Geometry
    """Of one part, as that of each of them is."""
    layer_names: tuple[str, ...]
    """Empty if the rank has none of the group's layers."""
    hash_tokens: int
    """Tokens that one of the engine's block hashes stands for."""
    group: int = 0
    """Number of the group among the engine's."""
    window: int = 0
    """See `plan.Group`."""
    span: int = 0
    state: bool = False
    shards: int = 1
    """Number of parts, of equally many heads, that a rank's KV is kept in."""
    copies: int = 1
    """Number of ranks that hold the same heads, if KV is kept in shards."""

    def of_rank(self, rank: int) -> list[KVSpec]:
        """The specs of all parts of another rank, or this one, that has these layers."""
        first = rank // self.copies * self.shards if self.layer_names else 0
        return [replace(self.spec, rank=first + part) for part in range(self.shards if self.layer_names else 0)]

    @property
    def page_elements(self) -> int:
        """Of all parts."""
        return self.geometry.page_elements + self.geometry.surrounding_elements

    @property
    def page_heads(self) -> int:
        return self.spec.num_kv_heads * self.shards


def identify(
    config: Any, kv_cache_config: Any, *, rank: int, about: Mapping[str, str | int | bool], pages: bool = True
) -> Identity:
    """One rank's KV of a model with full attention in all layers: `identify_groups`, for its only group."""
    layer_spec(kv_cache_config)
    (identity,) = identify_groups(config, kv_cache_config, rank=rank, about=lambda layer: about, pages=pages)
    return identity


def identify_groups(
    config: Any, kv_cache_config: Any, *, rank: int, about: Callable[[Any], Mapping[str, str | int | bool]],
    pages: bool = True, shards: int = 0,
) -> tuple[Identity, ...]:  # fmt: skip
    """By group of layers, those with full attention first, from a `VllmConfig` and a `KVCacheConfig`. about: what only
    vLLM itself can say (version, platform, ISA) of a layer with such a specification.

    rank: within its stage of a pipeline. pages: kept as they are, so that their layout and who laid them out are part
    of the identity; else as K and V. shards: the heads of all ranks are kept in so many parts, which have the same
    names however many ranks there are; 0: each rank's heads are one part.

    Raises ValueError, naming it, for what kvloom does not keep.
    """
    _refuse_parallelism(config.parallel_config)
    _refuse_speculation(config)
    _refuse_unhashed_images(config)
    check_cache_dtype(config)
    layers = layer_specs(kv_cache_config)
    layout = getattr(kv_cache_config, "kv_cache_layout", None)
    if layout is not None and layout not in _BLOCK_IN_ONE_PIECE:
        raise ValueError(
            f"KV cache layout {layout}: a block's KV of one layer is not in one piece; "
            f"set VLLM_KV_CACHE_LAYOUT to one of {', '.join(sorted(_BLOCK_IN_ONE_PIECE))}"
        )
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    if not algorithm.startswith("sha256"):
        raise ValueError(
            f"prefix_caching_hash_algo {algorithm}: its hashes differ from process to process and may collide; "
            "use --prefix-caching-hash-algo sha256 or sha256_cbor"
        )
    model = config.model_config
    revision = revision_of(model, config)
    draft = _draft_model(config)
    if draft is not None:
        revision += f", draft of {name_of(draft)}: {revision_of(draft, config)}"
    blocks = [int(layer.block_size) for layer in layers]
    hash_tokens = int(getattr(kv_cache_config, "hash_block_size", None) or gcd(*blocks))
    dtype = next((layer.dtype for layer in layers if not _is(layer, _STATE)), torch.uint8)
    found = []
    for number, (group, layer) in enumerate(zip(kv_cache_config.kv_cache_groups, layers, strict=True)):
        names, latent, state = tuple(group.layer_names), _is(layer, "MLAAttentionSpec"), _is(layer, _STATE)
        if state:
            _check_states(config, layer, hash_tokens=hash_tokens, pages=pages)
            page_bytes = -(-int(layer.real_page_size_bytes) // dtype.itemsize) * dtype.itemsize
        else:
            page_bytes = int(getattr(layer, "unpadded_page_size_bytes", layer.page_size_bytes))
        heads = _Heads.of(config, layer, shards)
        window = layer.sliding_window + getattr(layer, "extra_retained_tokens", 0) if _is(layer, _WINDOW) else 0
        # For some layers vLLM changes `cache_dtype`, which with several ranks only their processes see.
        quantised = str(getattr(layer, "cache_dtype_str", None) or config.cache_config.cache_dtype)
        span = layer.attention_chunk_size if _is(layer, _LOCAL) else 0
        spec = KVSpec(
            model=name_of(model),
            revision=revision,
            rope=plain_json(getattr(text_config(model), "rope_parameters", None) or {}),
            num_layers=len(names) or 1,  # of none, nothing is kept
            num_kv_heads=1 if state else int(layer.num_kv_heads) // heads.shards,
            head_size=page_bytes // dtype.itemsize if state else int(layer.head_size),
            dtype=str(dtype).removeprefix("torch."),
            kv_planes=1 if latent or state else 2,
            kv_quantization="" if quantised == "auto" else quantised,
            world_size=shards or int(config.parallel_config.tensor_parallel_size),
            rank=rank // heads.copies * heads.shards,
            # All ranks compute the same latents. KV with heads is divided among ranks, whatever it is called.
            replicated=(latent and int(layer.num_kv_heads) == 1) or bool(getattr(layer, "tp_replicated", False)),
        )
        elements = page_bytes // dtype.itemsize // heads.shards
        geometry = Geometry(
            layers=spec.num_layers,
            block_tokens=int(layer.block_size),
            page_elements=elements,
            surrounding_elements=elements * (heads.shards - 1),
            identity={
                "hash": algorithm,
                "compute_dtype": str(model.dtype),
                "layers": digest_of(names),
                "spec": type(layer).__name__,
                "window": str(getattr(layer, "sliding_window", None)),
                **({"span": span} if span else {}),
                **({"state": str([getattr(layer, name, None) for name in _STATES])} if state else {}),
                "content": str([getattr(layer, name, None) for name in _CONTENT if not shards or name != _SLOTS]),
                **({"layout": str(layout), **about(layer)} if pages else {}),
                **({"computed_with": "any number of ranks"} if shards else {}),
            },
        )
        found.append(
            Identity(spec, geometry, names, hash_tokens, number, window, span, state, heads.shards, heads.copies)
        )
    return tuple(sorted(found, key=lambda one: bool(one.window or one.span or one.state)))


def _draft_model(config: Any) -> Any:
    """The configuration of a draft model, whose layers have KV, too; None without one."""
    speculative = getattr(config, "speculative_config", None)
    return speculative.draft_model_config if getattr(speculative, "method", None) == "draft_model" else None


class _Heads(NamedTuple):
    """The division of a layer's heads."""

    shards: int
    """Of one rank."""
    copies: int
    """Number of ranks that hold the same heads."""

    @classmethod
    def of(cls, config: Any, layer: Any, shards: int) -> _Heads:
        """shards: of all ranks; 0: one for each rank. ValueError, naming it, for a number that cannot be."""
        if not shards:
            return cls(1, 1)
        ranks, here = int(config.parallel_config.tensor_parallel_size), int(layer.num_kv_heads)
        most = getattr(layer, "max_tp_shards", None) or int(config.model_config.get_total_num_kv_heads())
        copies = max(1, ranks // most)
        draft = _draft_model(config)
        if draft is not None and (others := max(1, ranks // int(draft.get_total_num_kv_heads()))) != copies:
            raise ValueError(
                f"connector.shards: {copies} of {ranks} ranks hold the same heads of the model, and {others} those of "
                "its draft model; remove it"
            )
        heads, apart = here * ranks // copies, ranks // copies
        if heads % shards or shards % apart:
            fit = [number for number in range(apart, heads + 1, apart) if not heads % number]
            raise ValueError(
                f"connector.shards: {heads} heads of KV on {apart} ranks cannot be kept in {shards} parts of equally "
                f"many heads; write one of {', '.join(map(str, fit))}"
            )
        return cls(shards // apart, copies)


class _Known(NamedTuple):
    """An adapter as it was when it was first seen."""

    name: str
    files: list[tuple[str, int, int, int]]


class Adapters:
    """LoRA adapters by their weights: vLLM's hashes cover their names and paths alone.

    An adapter's files are read when it is first seen, or loaded in place. If they change afterwards, nothing of it is
    stored or loaded: vLLM computes with what it has loaded, until it evicts the adapter and loads the files again.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Known | None] = {}

    def of(self, request: Any) -> str | None:
        """Name and digest of the adapter of a `LoRARequest`; "" for None, and None if its weights are not known."""
        if request is None:
            return ""
        key, path = (request.lora_int_id, request.lora_path), Path(request.lora_path)
        if key not in self._known or getattr(request, "load_inplace", False):
            try:
                files = versions(path)
                digest = folder_digest(path) if path.is_dir() else file_digest(path)
                self._known[key] = _Known(f"{request.lora_name}:{digest}", files)
            except (OSError, ValueError) as error:  # no path may have a NUL
                log.warning(
                    "KV of requests with adapter %s is not stored: %s", one_line(request.lora_name), one_line(error)
                )
                self._known[key] = None
        known = self._known[key]
        if known is None:
            return None
        if _changed(path, known.files):
            log.warning(
                "KV of requests with adapter %s is neither stored nor loaded any more: its files have changed, and "
                "vLLM may compute with these or with those before; load it in place, or unload it and load it again",
                one_line(request.lora_name),
            )
            self._known[key] = None
            return None
        return known.name


def _changed(path: Path, files: list[tuple[str, int, int, int]]) -> bool:
    """Return whether vLLM may load other files than these from there."""
    try:
        return path.exists() and versions(path) != files
    except OSError:
        return True


def check_cache_dtype(config: Any) -> None:
    """Raise ValueError where vLLM writes other numbers than it says that its cache holds. config: a `VllmConfig`."""
    named = str(config.cache_config.cache_dtype)
    device = getattr(getattr(config, "device_config", None), "device_type", "")
    model = str(config.model_config.dtype).removeprefix("torch.")
    if device == "cpu" and named in _FLOATS and named != model:
        raise ValueError(
            f"kv_cache_dtype {named} on a processor: vLLM writes the model's {model} there, so that a block's KV is "
            "not where the block is; use --kv-cache-dtype auto"
        )


def _refuse_unhashed_images(config: Any) -> None:
    media = getattr(config.model_config, "multimodal_config", None)
    cached = getattr(config.cache_config, "enable_prefix_caching", True)
    if media is not None and not cached and not getattr(media, "mm_processor_cache_gb", 1):
        raise ValueError(
            "mm_processor_cache_gb 0 without prefix caching: vLLM then numbers images instead of hashing them; "
            "leave one of the two on"
        )


def _refuse_speculation(config: Any) -> None:
    speculative = getattr(config, "speculative_config", None)
    if speculative is None:
        return
    if speculative.method not in _DRAFTS:
        raise ValueError(
            f"speculative_config.method {speculative.method}: the KV of its drafts depends on the token behind it, or "
            f"was not tested; use {', '.join(sorted(_DRAFTS))}"
        )
    if getattr(config.parallel_config, "pipeline_parallel_size", 1) > 1:
        raise ValueError(
            "pipeline_parallel_size with speculative_config: vLLM tells only the last stage when a step's KV is there; "
            "remove one"
        )


def _refuse_parallelism(parallel: Any) -> None:
    for name, text in (
        ("decode_context_parallel_size", "the tokens of a block are spread over ranks"),
        ("prefill_context_parallel_size", "the tokens of a block are spread over ranks"),
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ValueError(f"{name} {size}: {text}, which kvloom does not combine; use tensor parallelism")


def layer_specs(kv_cache_config: Any) -> list[Any]:
    """By group, the specification of one layer: all of a group's are alike. ValueError, naming it, for what kvloom does
    not keep."""
    layers = [_layer_of(group) for group in kv_cache_config.kv_cache_groups]
    if not layers:
        raise ValueError("no groups of KV cache: there is nothing to keep")
    dtypes = sorted({str(layer.dtype) for layer in layers if not _is(layer, _STATE)})
    if len(dtypes) > 1:
        raise ValueError(f"KV of {' and '.join(dtypes)} in one model: kvloom keeps one dtype; {_OFFLOADING}")
    return layers


def layer_spec(kv_cache_config: Any) -> Any:
    """The same, for a model with full attention in all layers. ValueError, naming it, for another."""
    layers = layer_specs(kv_cache_config)
    if len(layers) != 1 or not any(_is(layers[0], name) for name in _FULL):
        kinds = ", ".join(type(layer).__name__ for layer in layers)
        raise ValueError(
            f"{len(layers)} groups of KV cache ({kinds}): only full attention, in one group; start vLLM with "
            "--disable-hybrid-kv-cache-manager, which has windows in one group with the rest"
        )
    return layers[0]


def _layer_of(group: Any) -> Any:
    if getattr(group, "is_eagle_group", False):
        raise ValueError("speculative decoding with a draft model that shares the KV cache: its KV is not stored")
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        raise ValueError(f"a group of KV cache that vLLM does not give to connectors: {_OFFLOADING}")
    spec = group.kv_cache_spec
    layers = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
    first = layers[0]
    known = (*_FULL, _WINDOW, _LOCAL, _STATE)
    if not any(_is(first, name) for name in known) or any(other != first for other in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise ValueError(
            f"KV cache of {kinds}: kvloom keeps {', '.join(known)}, alike in all layers of a group; {_OFFLOADING}"
        )
    if getattr(first, "non_causal", False):
        raise ValueError("attention that is not causal: the KV of a token depends on those behind it")
    mode = getattr(getattr(first, "kv_quant_mode", None), "name", "NONE")
    if mode not in _PLAIN_QUANTISATION:
        raise ValueError(f"quantised KV ({mode}): its scales are not kept; use --kv-cache-dtype auto or fp8")
    return first


def _check_states(config: Any, layer: Any, *, hash_tokens: int, pages: bool) -> None:
    """Raise ValueError, naming it, where a block does not hold one state, at its end, in pages as they are."""
    cache = config.cache_config
    if layer.mamba_cache_mode != "align":
        raise ValueError(
            f"mamba_cache_mode {layer.mamba_cache_mode}: vLLM says only with align where a state is whole; "
            "use --enable-prefix-caching and --mamba-cache-mode align"
        )
    if layer.num_speculative_blocks:
        raise ValueError("speculative decoding with states: guessed tokens are in them; remove --speculative-config")
    if getattr(cache, "use_replayssm", False):
        raise ValueError("use_replayssm: a state is not whole without what is to be replayed; remove --use-replayssm")
    if layer.block_size != hash_tokens:
        raise ValueError(
            f"blocks of {layer.block_size} tokens, hashes of {hash_tokens}: vLLM then moves states to blocks that it "
            "does not name; remove --prefix-match-unit, or set --block-size so that all groups have the same"
        )
    if not pages:
        raise ValueError("connector: states are neither K nor V; write vllm, which keeps the engine's pages")


def _is(layer: Any, name: str) -> bool:
    """Exactly that one of vLLM's specifications: those that derive from it keep something else, or for another time."""
    return type(layer).__name__ == name
