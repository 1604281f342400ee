"""`type: nested_tuple`: for each layer a pair of K and V, with the tokens of one sequence along one of their axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvloom import Chunk, GPUConnector, MemoryFormat, Segment
from kvloom.device import synchronize

from .move import tensor_of
from .settings import NestedTupleConfig


class NestedTupleConnector(GPUConnector):
    """Reads and writes KV in the order of tokens, for research code and engines without pages.

    `where`: `kvcaches`, for each layer `(K, V)`, or one tensor where the model keeps one plane (MLA). The axis
    `token_dim` of each tensor is that of the whole sequence's tokens; the others, in order and but for those of size 1,
    are `[kv_heads, head_size]` or `[kv_heads * head_size]`.
    """

    type = "nested_tuple"
    format = MemoryFormat.KV_BLOB

    Config = NestedTupleConfig
    config: NestedTupleConfig

    def check(self, where: Mapping[str, Any], num_tokens: int) -> None:
        """Raise ValueError, by name, unless `where` has room for `num_tokens` tokens of this model's KV."""
        self._layers(where, num_tokens)

    @torch.inference_mode()
    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        """Copy from `kvcaches`; done on return."""
        self._move(segments, chunks, where, to_engine=False)

    @torch.inference_mode()
    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        """Copy into `kvcaches`; done on return."""
        self._move(segments, chunks, where, to_engine=True)

    @torch.inference_mode()
    def read_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        """Copy one layer from `kvcaches`, in which those of other layers may be None still; done on return."""
        self._move(segments, chunks, where, to_engine=False, layer=layer)

    @torch.inference_mode()
    def write_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        """Copy one layer into `kvcaches`; done on return."""
        self._move(segments, chunks, where, to_engine=True, layer=layer)

    def _move(
        self, segments: Sequence[Segment], chunks: Sequence[Chunk], where: Mapping[str, Any], *, to_engine: bool,
        layer: int | None = None,
    ) -> None:  # fmt: skip
        assert self.spec is not None
        if not segments:
            return
        layers = self._layers(where, segments[-1].end, layer)
        try:
            for segment, chunk in zip(segments, chunks, strict=True):
                ours = tensor_of(segment, chunk, self.spec, len(layers)).unflatten(
                    -1, (self.spec.num_kv_heads, self.spec.head_size)
                )
                for number, planes in enumerate(layers):
                    for plane, tensor in enumerate(planes):
                        theirs, mine = tensor[segment.start : segment.end], ours[plane, number]
                        to, source = (theirs, mine) if to_engine else (mine, theirs)
                        to.copy_(source, non_blocking=True)
        finally:  # the caller takes the chunks back, after an error too
            for device in {planes[0].device for planes in layers}:
                synchronize(device)

    def _layers(self, where: Mapping[str, Any], num_tokens: int, layer: int | None = None) -> list[list[torch.Tensor]]:
        """`[tokens, kv_heads, head_size]` of each plane of each layer, or of the one layer. ValueError as `check`."""
        assert self.spec is not None
        unknown = sorted(set(where) - {"kvcaches"})
        if unknown:
            raise ValueError(f"{unknown[0]}: the nested_tuple connector takes kvcaches=")
        layers = where.get("kvcaches")
        if not isinstance(layers, list | tuple):
            got = "nothing" if layers is None else type(layers).__name__
            raise ValueError(f"kvcaches: expected for each layer a pair (K, V), got {got}")
        if len(layers) != self.spec.num_layers:
            raise ValueError(f"kvcaches: {len(layers)} layers, the model has {self.spec.num_layers}")
        numbers = range(len(layers)) if layer is None else (layer,)
        return [self._planes(layers[number], num_tokens, f"kvcaches[{number}]") for number in numbers]

    def _planes(self, layer: Any, num_tokens: int, what: str) -> list[torch.Tensor]:
        assert self.spec is not None
        planes = [layer] if isinstance(layer, torch.Tensor) else layer
        if not isinstance(planes, list | tuple) or len(planes) != self.spec.kv_planes:
            expected = "a pair (K, V)" if self.spec.kv_planes == 2 else "a tensor"
            raise ValueError(f"{what}: expected {expected}")
        return [self._by_token(plane, num_tokens, what) for plane in planes]

    def _by_token(self, tensor: Any, num_tokens: int, what: str) -> torch.Tensor:
        """A view `[tokens, kv_heads, head_size]`."""
        assert self.spec is not None
        at, heads = self.config.token_dim, (self.spec.num_kv_heads, self.spec.head_size)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != self.spec.torch_dtype:
            got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(f"{what}: expected a tensor of {self.spec.torch_dtype}, got {got}")
        others = [size for axis, size in enumerate(tensor.shape) if axis != at and size != 1]
        fits = others in ([size for size in heads if size != 1], [size for size in [self.spec.hidden_dim] if size != 1])
        if at >= tensor.dim() or not fits:
            raise ValueError(f"{what}: {list(tensor.shape)} is not {list(heads)} for each token of axis {at}")
        if tensor.shape[at] < num_tokens:
            raise ValueError(f"{what}: room for {tensor.shape[at]} tokens, not {num_tokens}")
        tokens = tensor.movedim(at, 0)
        tokens = tokens.squeeze(tuple(axis for axis in range(1, tokens.dim()) if tokens.shape[axis] == 1))
        return tokens.unflatten(1, heads) if others == [self.spec.hidden_dim] else tokens.view(len(tokens), *heads)
