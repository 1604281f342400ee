"""LMCacheEngine and its builder as kvloom.Engine: store, look up, prefetch, retrieve, remove.

python examples/from_lmcache/engine.py
"""

from __future__ import annotations

import tempfile

import torch

import kvloom
from kvloom import Engine, EngineConfig, KVSpec


def main(folder: str) -> None:
    spec = KVSpec("example", num_layers=2, num_kv_heads=2, head_size=8, dtype="float32")  # LMCacheEngineMetadata
    config = EngineConfig.load(
        {
            "chunk_tokens": 16,
            "tokens": "chunked",  # LMCacheEngine(token_database)
            "connector": "plain",  # LMCacheEngine(gpu_connector)
            "tiers": [{"type": "memory", "capacity": "64MiB"}, {"type": "disk", "path": folder}],
        }
    )
    print("connector", config.connector.type, "and tokens", config.tokens.type)
    tokens, kv = torch.arange(48), torch.rand(spec.blob_shape(48))

    with Engine.open(config=config, spec=spec) as engine:
        engine.store(tokens, kv=kv)  # keyword arguments go to the connector
        behind = torch.arange(48) >= 16  # False for a prefix of whole chunks, then True
        engine.store(tokens, mask=behind, kv=kv)
        hit: kvloom.Hit = engine.lookup(tokens)
        assert hit.tokens == 48, "LMCache's number"
        assert engine.flush(30), "what is written in the background is written"
        assert engine.lookup(tokens, search_range=["disk"]).tokens == 48  # LMCache: ["LocalDiskBackend"]

        again = torch.zeros_like(kv)
        there = engine.retrieve(tokens, mask=behind, kv=again)
        assert there.tolist() == behind.tolist() and torch.equal(again[:, :, 16:], kv[:, :, 16:])

    one = Engine.get_or_create("worker", config, spec)  # LMCacheEngineBuilder
    assert Engine.get("worker") is one
    task: kvloom.Task = one.prefetch(tokens)
    print(int(task.result().sum()), "chunks are in memory, loaded from the disk")
    assert torch.equal(again[:, :, 16:], kv[:, :, 16:]) and one.retrieve(tokens, kv=again).all()
    key: kvloom.ChunkKey = kvloom.chain(tokens, chunk_tokens=16, fingerprint=one.fingerprint)[0].key  # CacheEngineKey
    print("the first chunk is", key)
    one.remove(tokens)
    assert one.lookup(tokens).tokens == 0
    Engine.destroy("worker")
    assert Engine.get("worker") is None


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as at:
        main(at)
