"""A lossy serializer, by the shortest way that is right."""

from __future__ import annotations

import torch

from kvloom import Buffers, Chunk, Config, CorruptBlobError, KVSpec, MemoryFormat, Serializer, join


class HalfSerializer(Serializer):
    """Values as float16. Those that are too large become the largest ones that there are."""

    type = "kit_half"
    lossless = False
    formats = frozenset({MemoryFormat.KV_BLOB})

    def __init__(self, config: Config, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        if spec is not None and (not spec.torch_dtype.is_floating_point or spec.dtype == "float16"):
            raise ValueError(f"KV of {spec.dtype} cannot be kept as float16")

    def encode(self, chunk: Chunk) -> Buffers:
        return [self.narrow(chunk.tensor.float()).numpy().tobytes()]

    def narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        limit = torch.finfo(torch.float16).max
        return tensor.clamp(-limit, limit).half()

    def decode(self, blob: Buffers, into: Chunk) -> None:
        data = bytearray(join(blob))
        if len(data) != 2 * into.tensor.numel():
            raise CorruptBlobError("not as many float16 as the chunk has elements")
        into.tensor.copy_(torch.frombuffer(data, dtype=torch.float16).view(into.tensor.shape))
