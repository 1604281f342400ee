"""`type: transformers`: the KV caches of Hugging Face transformers as KV_BLOB chunks.

A cache keeps, for each layer, K and V of `[rows, kv_heads, tokens, head_size]`; a chunk is `[2, layers, tokens,
kv_heads * head_size]`. Where K and V are of different sizes, it is `[1, layers, tokens, kv_heads * (key_size +
value_size)]`. Both ways it is one strided copy per layer of K and of V, nothing in between.

transformers takes over a second to import, and opening any engine loads this class. So transformers is only imported
where there is a cache, which means that it is loaded already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvloom import Chunk, GPUConnector, MemoryFormat, Segment

from .restored import RestoredKV, set_length

Pair = tuple[torch.Tensor, torch.Tensor]
"""(K, V) of a layer, each `[rows, kv_heads, tokens, head_size]`."""
Planes = list[Pair]
"""The planes of each layer."""


class TransformersConnector(GPUConnector):
    """Reads and writes a `DynamicCache`, a `StaticCache` or a `RestoredKV`.

    `where`: `cache`, one of those three; `row: int = 0`, which sequence of the batch the tokens are.

    Writing never grows a cache. A `StaticCache` must have its tensors (`early_initialization`) and gets its length
    set to the end of what is written; to restore into a `DynamicCache`, write into a `RestoredKV` and `install` it.
    """

    type = "transformers"
    format = MemoryFormat.KV_BLOB

    def check(self, where: Mapping[str, Any], num_tokens: int) -> None:
        """Raise ValueError, by name, unless `where` has room for `num_tokens` tokens of this model's KV."""
        cache = _cache_of(where)
        planes = _planes(cache)
        self._check_layers(planes)
        _check_row(where, planes[0])
        tokens = planes[0][0].shape[2]
        if num_tokens > tokens:
            dynamic = type(cache).__name__ == "DynamicCache"
            hint = "; to restore, write into a RestoredKV and install it" if dynamic else ""
            raise ValueError(f"cache: {type(cache).__name__} with room for {tokens} tokens, not {num_tokens}{hint}")

    def _check_layers(self, planes: Planes) -> None:
        spec = self.spec
        assert spec is not None
        if len(planes) != spec.num_layers:
            raise ValueError(f"cache: {len(planes)} layers, the model has {spec.num_layers}")
        for number, pair in enumerate(planes):
            self._check_layer(number, pair)

    def _check_layer(self, number: int, pair: Pair) -> None:
        spec = self.spec
        assert spec is not None
        # In one plane they share what the spec says; how, is the config's, and in the fingerprint.
        value_size = spec.head_size if spec.kv_planes == 2 else pair[1].shape[3]
        key_size = spec.head_size if spec.kv_planes == 2 else spec.head_size - value_size
        for name, tensor, size in zip(("K", "V"), pair, (key_size, value_size), strict=True):
            shape, expected = (tensor.shape[1], tensor.shape[3]), (spec.num_kv_heads, size)
            if shape != expected:
                raise ValueError(f"cache: {name} of layer {number} has (heads, head size) {shape}, not {expected}")
            if tensor.dtype != spec.torch_dtype:
                raise ValueError(f"cache: {name} of layer {number} is {tensor.dtype}, not {spec.torch_dtype}")

    @torch.inference_mode()
    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], *, cache: Any, row: int = 0) -> None:
        """Copy from `cache`; done on return. ValueError if it does not hold the tokens yet."""
        planes = _planes(cache)
        held = _length(cache)
        if segments and segments[-1].end > held:
            raise ValueError(f"cache: holds {held} tokens, not {segments[-1].end}")
        for theirs, ours in self._pairs(planes, segments, chunks, row):
            ours.copy_(theirs, non_blocking=True)
        _finish(planes)

    @torch.inference_mode()
    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], *, cache: Any, row: int = 0) -> None:
        """Copy into `cache`; done on return. Runs of segments may come in several calls, in order."""
        planes = _planes(cache)
        for theirs, ours in self._pairs(planes, segments, chunks, row):
            theirs.copy_(ours, non_blocking=True)
        if isinstance(cache, RestoredKV):
            cache.lossy.update(chunk.fidelity for chunk in chunks if not chunk.exact)
        elif type(cache).__name__ == "StaticCache" and segments:
            set_length(cache, segments[-1].end)
        _finish(planes)

    @torch.inference_mode()
    def read_layer(
        self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], *, cache: Any = None, row: int = 0
    ) -> None:
        """Copy one layer from `cache`; done on return. Later layers of a DynamicCache need not be there yet."""
        where = {"cache": cache, "row": row}
        pair = _layer(_cache_of(where), layer)
        self._check_layer(layer, pair)
        _check_row(where, pair)
        held = pair[0].shape[2] if isinstance(cache, RestoredKV) else int(cache.layers[layer].get_seq_length())
        if segments and segments[-1].end > held:
            raise ValueError(f"cache: layer {layer} holds {held} tokens, not {segments[-1].end}")
        for theirs, ours in self._pairs([pair], segments, chunks, row):
            ours.copy_(theirs, non_blocking=True)
        _finish([pair])

    @torch.inference_mode()
    def write_layer(
        self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], *, cache: Any, row: int = 0
    ) -> None:
        """Copy one layer into `cache`; done on return.

        It does not change the length of a StaticCache, because a layer's mask decides how many tokens count. Set the
        length with `set_length` after `wait`: of chunks that came whole, `write` has set it.
        """
        pair = _layer(cache, layer)
        for theirs, ours in self._pairs([pair], segments, chunks, row):
            theirs.copy_(ours, non_blocking=True)
        if isinstance(cache, RestoredKV):
            cache.lossy.update(chunk.fidelity for chunk in chunks if not chunk.exact)
        _finish([pair])

    def _pairs(self, planes: Planes, segments: Sequence[Segment], chunks: Sequence[Chunk], row: int) -> Any:
        """Views of the cache and of the chunks that hold the same KV, `[kv_heads, tokens, size]`."""
        assert self.spec is not None
        heads = (self.spec.num_kv_heads, self.spec.head_size)
        for segment, chunk in zip(segments, chunks, strict=True):
            split = chunk.tensor.unflatten(-1, heads).transpose(2, 3)
            for layer, pair in enumerate(planes):
                sizes = [tensor.shape[-1] for tensor in pair]
                parts = split[:, layer] if len(split) == 2 else split[0, layer].split(sizes, dim=-1)
                for tensor, part in zip(pair, parts, strict=True):
                    yield tensor[row, :, segment.start : segment.end], part


def _cache_of(where: Mapping[str, Any]) -> Any:
    """The cache. ValueError for invalid arguments."""
    unknown = sorted(set(where) - {"cache", "row"})
    if unknown:
        raise ValueError(f"{unknown[0]}: the transformers connector takes cache= and row=")
    if where.get("cache") is None:
        raise ValueError("cache: missing; pass cache=, a DynamicCache, StaticCache or RestoredKV")
    return where["cache"]


def _check_row(where: Mapping[str, Any], pair: Pair) -> None:
    row, rows = where.get("row", 0), pair[0].shape[0]
    if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < rows:
        raise ValueError(f"row: {row!r} of a cache with {rows} rows")


def _planes(cache: Any) -> Planes:
    """K and V of each layer. ValueError unless the cache is one that keeps them plainly."""
    if isinstance(cache, RestoredKV):
        return list(zip(cache.keys, cache.values, strict=True))
    planes = [_pair(cache, number) for number in range(_num_layers(cache))]
    if not planes:
        raise ValueError(f"cache: the {type(cache).__name__} holds nothing yet")
    return planes


def _layer(cache: Any, number: int) -> Pair:
    """K and V of one layer. ValueError as for `_planes`, but whatever the other layers are."""
    if isinstance(cache, RestoredKV):
        return cache.keys[number], cache.values[number]
    if number >= _num_layers(cache):
        raise ValueError(f"cache: layer {number} of the {type(cache).__name__} holds nothing yet")
    return _pair(cache, number)


def _plain_layers(cache: Any) -> tuple[type, ...]:
    """The classes of layers that hold K and V of every token in such a cache."""
    from transformers import DynamicCache, StaticCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

    plain: tuple[type, ...] | None = {
        DynamicCache: (DynamicLayer, DynamicSlidingWindowLayer),
        StaticCache: (StaticLayer,),
    }.get(type(cache))
    if plain is None:
        raise ValueError(f"cache: {type(cache).__name__}, not a DynamicCache, StaticCache or RestoredKV")
    return plain


def _num_layers(cache: Any) -> int:
    _plain_layers(cache)
    if cache.offloading:
        raise ValueError(f"cache: {type(cache).__name__} with offloading moves its layers while they are copied")
    return len(cache.layers)


def _pair(cache: Any, number: int) -> Pair:
    plain, layer = _plain_layers(cache), cache.layers[number]
    if type(layer) not in plain:
        names = " or ".join(kind.__name__ for kind in plain)
        raise ValueError(f"cache: layer {number} is a {type(layer).__name__}, not a {names}")
    if not layer.is_initialized:
        how = "; call early_initialization() first" if type(cache).__name__ == "StaticCache" else ""
        raise ValueError(f"cache: layer {number} of the {type(cache).__name__} holds nothing yet{how}")
    if layer.is_sliding and layer.keys.shape[2] != layer.cumulative_length:
        raise ValueError(
            f"cache: layer {number} has a window and kept {layer.keys.shape[2]} of {layer.cumulative_length} tokens; "
            "call activate_past_recording() on the cache before its first token"
        )
    return layer.keys, layer.values


def _length(cache: Any) -> int:
    """The number of tokens in `cache`."""
    return cache.num_tokens if isinstance(cache, RestoredKV) else int(cache.get_seq_length())


def _finish(planes: Planes) -> None:
    """Wait for the copies from and to other devices: chunks are given back when this returns."""
    for device in {tensor.device for pair in planes for tensor in pair if tensor.device.type != "cpu"}:
        module = torch.get_device_module(device)
        stream = module.current_stream(device) if hasattr(module, "current_stream") else module
        stream.synchronize()
