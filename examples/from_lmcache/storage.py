"""LMCache's storage backends: chunks in and out of a kvloom.Tier, bytes in and out of a kvloom.StorageBackend.

python examples/from_lmcache/storage.py
"""

from __future__ import annotations

import tempfile

import torch

import kvloom
from kvloom import Engine, KVSpec, open_tier
from kvloom.tiers.stored.tier import StoredTier
from kvloom_backend_disk.backend import DiskBackend


class Memory:
    """A sink: where a backend reads to without a copy."""

    def reserve(self, num_bytes: int) -> memoryview:
        self.data = bytearray(num_bytes)
        return memoryview(self.data)

    def filled(self, num_bytes: int) -> None:
        """So many bytes have arrived."""


def chunks(folder: str) -> None:
    """LMCBackendInterface, and LocalDiskBackend as far as it is one."""
    spec = KVSpec("example", num_layers=2, num_kv_heads=2, head_size=8, dtype="float32")
    first, second = kvloom.chain(torch.arange(32), chunk_tokens=16, fingerprint="0" * 32)
    kv_chunk = torch.rand(spec.blob_shape(16))
    tier = open_tier({"type": "disk", "path": folder}, spec, dst_device="cpu")
    tier.put(key=first.key, kv_chunk=kv_chunk)
    tier.put(second.key, kv_chunk, blocking=False)  # submit_put_task; one that is under way is not begun again
    assert tier.contains(first.key)
    got = tier.get(first.key)  # get_blocking, load_disk
    assert got is not None and torch.equal(got, kv_chunk)
    assert tier.batched_put([(first.key, kv_chunk), (second.key, kv_chunk)], blocking=True) <= 2
    assert all(one is not None for one in tier.batched_get([first.key, second.key]))
    tier.close()


def blobs(folder: str) -> None:
    """The interface that a plugin implements."""
    backend: kvloom.StorageBackend = DiskBackend(DiskBackend.Config(path=folder))
    backend.put("a", [b"bytes"])
    assert backend.contains("a") and backend.get("a") == b"bytes"  # load_bytes_from_disk
    memory = Memory()
    assert backend.get_into("a", memory) and memory.data == b"bytes"
    assert [entry.key for entry in backend.scan()] == ["a"], "a ledger is rebuilt from this after a restart"
    backend.delete("a")
    assert not backend.contains("a")
    assert isinstance(backend, kvloom.Component)
    backend.close()


def stack(folder: str) -> None:
    """StorageManager: the tiers of one engine, in order."""
    spec = KVSpec("example", num_layers=2, num_kv_heads=2, head_size=8, dtype="float32")
    config = {"chunk_tokens": 16, "tiers": [{"type": "memory", "capacity": "64MiB"}, {"type": "disk", "path": folder}]}
    tokens, kv = torch.arange(32), torch.rand(spec.blob_shape(32))
    with Engine.open(config, spec) as engine:
        engine.store(tokens, kv=kv)  # async_save_bytes_to_disk: tiers below memory are written in the background
        engine.flush(30)
        assert engine.prefetch(tokens).result() is not None  # submit_prefetch_task, async_load_bytes_from_disk
        assert isinstance(engine.tiers["disk"], StoredTier)
        engine.remove(tokens)


if __name__ == "__main__":
    for work in (chunks, blobs, stack):
        with tempfile.TemporaryDirectory() as at:
            work(at)
    print("chunks, bytes and tiers: ok")
