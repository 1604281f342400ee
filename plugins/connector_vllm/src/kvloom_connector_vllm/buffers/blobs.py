"""Several tensors as one framed blob, and back once every byte was verified."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvloom import EXACT, Buffer, Buffers, CorruptBlobError, UnreadableBlobError, envelope

_FORMAT = "kv_buffer"
_MOST_DIMENSIONS = 64
_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
        *("float8_e5m2fnuz", "int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def check(name: str, tensor: object) -> None:
    """Raise TypeError, naming the argument, if `tensor` cannot be kept."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor of {', '.join(_DTYPES)}; got {tensor.dtype}, {tensor.layout}")


def seal(key: str, tensors: Sequence[torch.Tensor | None], *, params: Mapping[str, Any] | None = None) -> Buffers:
    """The framed blob of `tensors`, on whatever device they are. params: JSON values that are kept with them."""
    described = [None if t is None else {"dtype": _NAMES[t.dtype], "shape": list(t.shape)} for t in tensors]
    description = envelope.Description(
        key=key, serializer=_FORMAT, shape=(), dtype="", format=_FORMAT, num_tokens=0, fidelity=EXACT,
        params={**(params or {}), "tensors": described}, written=int(time.time()),
    )  # fmt: skip
    return envelope.seal(description, [_bytes(tensor) for tensor in tensors])


def unseal(blob: Buffer, *, key: str) -> tuple[list[torch.Tensor | None], Mapping[str, Any]]:
    """The tensors of a framed blob, in new memory, and the values stored with them.

    Raises CorruptBlobError, or UnreadableBlobError if it is intact and not a blob of this module.
    """
    header, payload = envelope.unseal(blob, key=key)
    return tensors(header, payload, len(header.lengths)), header.description.params


def tensors(header: envelope.Header, payload: memoryview, count: int) -> list[torch.Tensor | None]:
    """The first `count` tensors. payload: verified as far as they reach. Raises UnreadableBlobError."""
    described = header.description.params.get("tensors")
    if header.description.serializer != _FORMAT or not isinstance(described, list):
        raise UnreadableBlobError(f"not a blob of a KV buffer: {header.description.serializer}")
    if len(described) != len(header.lengths) or len(described) < count:
        raise UnreadableBlobError(f"{len(described)} tensors described, {len(header.lengths)} there")
    found: list[torch.Tensor | None] = []
    at = 0
    for one, length in zip(described[:count], header.lengths, strict=False):
        found.append(_tensor(one, payload[at : at + length]))
        at += length
    return found


def _bytes(tensor: torch.Tensor | None) -> Buffer:
    if tensor is None or not tensor.numel():
        return b""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy().data).cast("B")


def _tensor(described: Any, data: memoryview) -> torch.Tensor | None:
    if described is None:
        return None
    try:
        shape, dtype = [int(size) for size in described["shape"]], _DTYPES[described["dtype"]]
        if not isinstance(described["shape"], list) or len(shape) > _MOST_DIMENSIONS or any(size < 0 for size in shape):
            raise ValueError("no shape")
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableBlobError("the blob has a tensor that this process cannot create") from error
    if math.prod(shape) * dtype.itemsize != len(data):  # before memory is taken for it
        raise CorruptBlobError(f"{len(data)} bytes for a tensor of another size")
    try:
        tensor = torch.empty(shape, dtype=dtype)
    except (RuntimeError, TypeError) as error:
        raise UnreadableBlobError("the blob has a tensor that this process cannot create") from error
    if len(data):
        tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, dtype=np.uint8)
    return tensor
