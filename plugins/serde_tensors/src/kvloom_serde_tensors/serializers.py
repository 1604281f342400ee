"""The payload of a blob as a file of a well-known format, in the chunk's dtype or in one that takes less room."""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, get_args

import safetensors.torch
import torch

from kvloom import EXACT, Buffer, Buffers, Chunk, CorruptBlobError, KVSpec, MemoryFormat, Serializer, join
from kvloom_serde_tensors import archive
from kvloom_serde_tensors.settings import DtypeName, TensorConfig

_CASTABLE = frozenset(getattr(torch, name) for name in get_args(DtypeName)) | {torch.float64}

_MOST_HEADER_BYTES = 4096
"""A header of safetensors that describes one tensor has some 100 bytes."""


class TensorSerializer(Serializer):
    """The common part of both formats: the cast, its cost in fidelity, and the checks when decoding."""

    Config = TensorConfig

    def __init__(self, config: TensorConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        casts = config.dtype is not None and (spec is None or config.dtype != spec.dtype)
        if casts and spec is not None and spec.torch_dtype not in _CASTABLE:
            raise ValueError(f"KV of {spec.dtype} cannot be kept as {config.dtype}; leave `dtype` out")
        self._cast_to: DtypeName | None = config.dtype if casts else None
        # On the instance: they follow from the settings. Widening counts as lossy too, for it loses the bits of NaNs.
        self.lossless = not casts  # type: ignore[misc]
        if casts:
            # The bytes of opaque pages have no known meaning, so they cannot be cast.
            self.formats = frozenset({MemoryFormat.KV_BLOB})  # type: ignore[misc]

    @property
    def params(self) -> Mapping[str, Any]:
        return {"dtype": self._cast_to} if self._cast_to else {}

    @property
    def fidelity(self) -> str:
        return f"{self.type}/{self._cast_to}" if self._cast_to else EXACT

    def encode(self, chunk: Chunk) -> Buffers:
        tensor = chunk.tensor
        if self._cast_to:
            dtype = getattr(torch, self._cast_to)
            limit = torch.finfo(dtype).max  # values out of range become the largest number, not infinity or NaN
            tensor = tensor.to(torch.float32).clamp(-limit, limit).to(dtype)
        return [self._dump(tensor.contiguous())]

    def decode(self, blob: Buffers, into: Chunk) -> None:
        try:
            tensor = self._load(join(blob))
        except Exception as error:
            raise CorruptBlobError(f"not a {self.type} blob: {str(error)[:200]}") from error
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise CorruptBlobError(f"a {self.type} blob holds a {type(tensor).__name__}, not a plain tensor")
        wanted = into.tensor
        if tensor.shape != wanted.shape:
            raise CorruptBlobError(f"a tensor of {tuple(tensor.shape)} where {tuple(wanted.shape)} was stored")
        if tensor.dtype != wanted.dtype and not {tensor.dtype, wanted.dtype} <= _CASTABLE:
            raise CorruptBlobError(f"a tensor of {tensor.dtype} where {wanted.dtype} was stored")
        wanted.copy_(tensor)

    def max_encoded_bytes(self, chunk: Chunk) -> int:
        item_bytes = getattr(torch, self._cast_to).itemsize if self._cast_to else chunk.tensor.element_size()
        return chunk.tensor.numel() * item_bytes + 65536

    @abstractmethod
    def _dump(self, tensor: torch.Tensor) -> Buffer:
        """The contiguous `tensor` as a file of this format."""

    @abstractmethod
    def _load(self, data: bytes) -> Any:
        """The inverse; raises whatever it likes if `data` is no such file."""


class TorchSerializer(TensorSerializer):
    """Blobs that `torch.load` reads."""

    type: ClassVar[str] = "torch"

    def _dump(self, tensor: torch.Tensor) -> Buffer:
        # torch.save writes a view's whole storage, which for a chunk in the pool is the KV of all requests.
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        file = io.BytesIO()
        torch.save(tensor, file)
        return file.getbuffer()

    def _load(self, data: bytes) -> Any:
        return archive.tensor_of(data)


class SafetensorsSerializer(TensorSerializer):
    """Blobs that the safetensors libraries read; the tensor's name is `kv`."""

    type: ClassVar[str] = "safetensors"

    def _dump(self, tensor: torch.Tensor) -> Buffer:
        return safetensors.torch.save({"kv": tensor})

    def _load(self, data: bytes) -> Any:
        if int.from_bytes(data[:8], "little") > _MOST_HEADER_BYTES:
            raise ValueError("a header of more than a tensor")  # which the library would go on to parse
        (tensor,) = safetensors.torch.load(data).values()
        return tensor
