"""KV that is one tensor already: for research code, tests and benchmarks."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from kvloom import Chunk, GPUConnector, MemoryFormat, Segment, native

if TYPE_CHECKING:
    import torch

_MOST_NATIVE_BYTES = 1 << 20
"""Size of the largest chunk that is copied natively: torch copies larger ones faster, with several threads each."""


_LEAST_LAYER_BYTES = 8 << 20
"""Bytes of one layer, of all chunks together, from which they are copied natively: past the cache, which does not hold
them. Below, torch is as fast."""


class PlainConnector(GPUConnector):
    """where: `kv`, a tensor `[2, num_layers, num_tokens, hidden_dim]` of the whole sequence, on any device."""

    type = "plain"
    format = MemoryFormat.KV_BLOB

    def check(self, where: Mapping[str, Any], num_tokens: int) -> None:
        import torch

        assert self.spec is not None
        unknown = set(where) - {"kv"}
        if unknown or "kv" not in where:
            raise ValueError(f"plain connector: expected kv=<tensor>, got {sorted(where) or 'nothing'}")
        kv = where["kv"]
        planes, layers, _, hidden = self.spec.blob_shape(num_tokens)
        if not isinstance(kv, torch.Tensor):
            raise ValueError(
                f"kv: expected a tensor [{planes}, {layers}, >={num_tokens}, {hidden}], got {type(kv).__name__}"
            )
        fits = kv.dim() == 4 and (*kv.shape[:2], kv.shape[3]) == (planes, layers, hidden) and kv.shape[2] >= num_tokens
        if not fits or kv.dtype != self.spec.torch_dtype:
            raise ValueError(
                f"kv: expected [{planes}, {layers}, >={num_tokens}, {hidden}] of {self.spec.dtype}, "
                f"got {list(kv.shape)} of {kv.dtype}"
            )

    def read(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        import torch

        if _copied(where["kv"], segments, chunks, to_kv=False):
            return
        with torch.inference_mode():
            kv: torch.Tensor = where["kv"]
            for segment, chunk in zip(segments, chunks, strict=True):
                chunk.tensor.copy_(kv[:, :, segment.start : segment.end])

    def write(self, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        import torch

        if _copied(where["kv"], segments, chunks, to_kv=True):
            return
        with torch.inference_mode():
            kv: torch.Tensor = where["kv"]
            for segment, chunk in zip(segments, chunks, strict=True):
                kv[:, :, segment.start : segment.end].copy_(chunk.tensor)

    def read_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        import torch

        with torch.inference_mode():
            self.check(where, max(segment.end for segment in segments))
            if _copied(where["kv"], segments, chunks, to_kv=False, layer=layer):
                return
            kv: torch.Tensor = where["kv"]
            for segment, chunk in zip(segments, chunks, strict=True):
                chunk.tensor.copy_(kv[:, layer : layer + 1, segment.start : segment.end])

    def write_layer(self, layer: int, segments: Sequence[Segment], chunks: Sequence[Chunk], **where: Any) -> None:
        import torch

        if _copied(where["kv"], segments, chunks, to_kv=True, layer=layer):
            return
        with torch.inference_mode():
            kv: torch.Tensor = where["kv"]
            for segment, chunk in zip(segments, chunks, strict=True):
                kv[:, layer : layer + 1, segment.start : segment.end].copy_(chunk.tensor)


def _copied(
    kv: torch.Tensor, segments: Sequence[Segment], chunks: Sequence[Chunk], *, to_kv: bool, layer: int | None = None
) -> bool:
    """Copy all chunks natively. False: it was left to torch, and nothing is copied.

    layer: the chunks have only this one, and may be views of longer ones.
    """
    import torch

    copy = _native_copy()
    if copy is None or kv.dim() != 4 or kv.is_quantized or not _lies_flat(kv):
        return False
    if kv.untyped_storage().nbytes() < (kv.storage_offset() + kv.numel()) * kv.itemsize:
        return False  # torch says what is wrong with it
    planes, layers, kv_tokens, hidden = kv.shape
    if layer is not None and not 0 <= layer < layers:
        return False
    # By one call: all rows of the chunks, or those of one plane.
    own_layers, rows, calls = (layers, planes * layers, 1) if layer is None else (1, 1, planes)
    token_bytes = hidden * kv.itemsize
    num_tokens = sum(end - start for start, end, _ in segments)
    if layer is not None and planes * num_tokens * token_bytes < _LEAST_LAYER_BYTES:
        return False
    most_tokens = _MOST_NATIVE_BYTES // (planes * own_layers * token_bytes)
    tables = [array("Q") for _ in range(calls)]
    for (start, end, _), chunk in zip(segments, chunks, strict=True):
        tensor, tokens = chunk.tensor, end - start
        if tokens > most_tokens or tensor.dtype != kv.dtype or tensor.shape != (planes, own_layers, tokens, hidden):
            return False
        step = tensor.stride(0)
        apart = layer is not None and step >= tokens * hidden and _lies_flat(tensor[0])
        if start < 0 or not (apart or _lies_flat(tensor)):
            return False
        for plane, table in enumerate(tables):
            table.extend((tensor.data_ptr() + plane * step * kv.itemsize, start, tokens))
    for plane, table in enumerate(tables):
        row = plane * layers + (layer or 0)
        into = kv.data_ptr() + row * kv_tokens * token_bytes
        if copy(into, rows, kv_tokens, token_bytes, table.buffer_info()[0], len(chunks), to_kv):
            return False  # before anything is copied: tokens and their places are the same in every call
    if to_kv and not kv.is_inference():
        torch.autograd.graph.increment_version(kv)
    return True


def _lies_flat(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor of any shape lie in host memory one behind the other, just as they are.

    Not those of subclasses, and where torch negates elements as it reads them, or has no memory for them.
    """
    import torch

    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu and tensor.layout is torch.strided
    return plain and tensor.is_contiguous() and not tensor.is_neg() and tensor.data_ptr() != 0


@cache
def _native_copy() -> Callable[..., int] | None:
    """The function of `kvloom-native`, if it is there."""
    size, address = ctypes.c_uint64, ctypes.c_void_p
    return native.own_function("kvloom_copy_chunks", address, size, size, size, address, size, ctypes.c_int)
