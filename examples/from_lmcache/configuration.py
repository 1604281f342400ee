"""LMCacheEngineConfig as kvloom.EngineConfig: from LMCache's words, from YAML, from the environment.

python examples/from_lmcache/configuration.py
"""

from __future__ import annotations

import os
from pathlib import Path

from kvloom import EngineConfig
from kvloom.config import MemoryBlock, StoredBlock

HERE = Path(__file__).parent
GiB = 1 << 30


def main() -> None:
    config = EngineConfig.from_defaults(
        chunk_size=128, local_cpu=True, max_local_cpu_size=2.0, local_disk="/var/lib/kv", max_local_disk_size=20,
        remote_url="redis://127.0.0.1:6379", remote_serde="naive", save_decode_cache=True, enable_blending=True,
        blend_recompute_ratio=0.3, blend_min_tokens=64, enable_p2p=True, lookup_url="mooncake://127.0.0.1:50051",
        distributed_url="tcp://127.0.0.1:8200",
        error_handling=True,  # always on: a tier's BackendError is a miss outside
    )  # fmt: skip
    assert config.chunk_tokens == 128 and config.save_decode_cache
    memory, disk, redis, mooncake = config.tiers
    assert isinstance(memory, MemoryBlock) and memory.capacity == 2 * GiB
    assert isinstance(disk, StoredBlock) and disk.capacity == 20 * GiB and disk.settings["path"] == "/var/lib/kv"
    assert isinstance(redis, StoredBlock) and redis.serializer.type == "raw"
    assert isinstance(mooncake, StoredBlock)
    peers = {"master": "127.0.0.1:50051", "local_host": "127.0.0.1", "segment": 2 * GiB}
    assert mooncake.settings == peers
    assert config.blend is not None and config.blend.min_tokens == 64
    assert config.blend.settings == {"recompute_ratio": 0.3}

    old = EngineConfig.from_legacy(chunk_size=128, backend="local_cpu_disk", max_local_disk_size=20)
    assert [tier.type for tier in old.tiers] == ["memory", "disk"]
    assert EngineConfig.from_file(HERE / "cpu_offload.yaml").tiers[0].type == "memory"
    os.environ["KVLOOM_CHUNK_TOKENS"] = "64"
    assert EngineConfig.from_env().chunk_tokens == 64
    print("every field is taken")


if __name__ == "__main__":
    main()
