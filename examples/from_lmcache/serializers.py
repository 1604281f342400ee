"""LMCache's serializers: a chunk to bytes and back, by each of them, and timed.

python examples/from_lmcache/serializers.py
"""

from __future__ import annotations

import torch

import kvloom.builtin.raw
import kvloom_serde_tensors
from kvloom import Chunk, KVSpec, MemoryFormat, Serializer
from kvloom.builtin.raw import RawSerializer
from kvloom.runtime import SystemRuntime
from kvloom.telemetry.timed_serializer import TimedSerializer
from kvloom_serde_tensors.serializers import SafetensorsSerializer, TorchSerializer


def there_and_back(serializer: Serializer, spec: KVSpec) -> None:
    chunk = Chunk(torch.rand(spec.blob_shape(16)), MemoryFormat.KV_BLOB, num_tokens=16)
    blob = serializer.encode(chunk)  # to_bytes
    into = Chunk(torch.empty_like(chunk.tensor), MemoryFormat.KV_BLOB, num_tokens=16)
    serializer.decode(blob, into=into)  # from_bytes; the dtype is that of `into`
    assert torch.equal(into.tensor, chunk.tensor)
    print(serializer.type, sum(memoryview(part).nbytes for part in blob), "bytes")


def main() -> None:
    spec = KVSpec("example", num_layers=2, num_kv_heads=2, head_size=8, dtype="float32")
    print("from", kvloom.builtin.raw.__name__, "and", kvloom_serde_tensors.__name__)
    there_and_back(RawSerializer(RawSerializer.Config(), spec), spec)  # FastSerializer
    there_and_back(TorchSerializer(TorchSerializer.Config(), spec), spec)
    safe = SafetensorsSerializer(SafetensorsSerializer.Config(), spec)  # SafeSerializer
    there_and_back(safe, spec)
    there_and_back(TimedSerializer(safe, SystemRuntime()), spec)  # SerializerDebugWrapper; `timed: true` in YAML


if __name__ == "__main__":
    main()
