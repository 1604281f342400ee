"""LMCache's words: each of them gives what it gave there, or says why not."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from kvloom import ConfigError, EngineConfig
from kvloom.config import StoredBlock
from kvloom.config.legacy import BACKENDS, FIELDS

GiB = 1 << 30

FROM_LEGACY = (
    "chunk_size: int = 256, backend: str = 'cpu', remote_url: str | None = 'lm://localhost:65432', "
    "remote_serde: str = 'naive', save_decode_cache: bool = False, enable_blending: bool = False, "
    "blend_recompute_ratio: float = 0.15, blend_min_tokens: int = 256, max_local_disk_size: float = 0.0, "
    "enable_p2p: bool = False, lookup_url: str | None = None, distributed_url: str | None = None, "
    "error_handling: bool = False"
)
"""The signature in LMCache's documentation, and below that of from_defaults."""

FROM_DEFAULTS = {
    "chunk_size": 256,
    "local_cpu": True,
    "max_local_cpu_size": 5.0,
    "local_disk": None,
    "max_local_disk_size": 0,
    "remote_url": "lm://localhost:65432",
    "remote_serde": "naive",
    "save_decode_cache": False,
    "enable_blending": False,
    "blend_recompute_ratio": 0.15,
    "blend_min_tokens": 256,
    "enable_p2p": False,
    "lookup_url": None,
    "distributed_url": None,
    "error_handling": False,
}


def tiers(config: EngineConfig) -> list[dict[str, Any]]:
    """Type, capacity, serializer and the plugin's settings of each tier, as far as they say something."""
    found = []
    for tier in config.tiers:
        block: dict[str, Any] = {"type": tier.type, "capacity": tier.capacity}
        if isinstance(tier, StoredBlock):
            block |= {"serializer": tier.serializer.type, **tier.settings}
        found.append({key: value for key, value in block.items() if value is not None})
    return found


MEMORY = {"type": "memory", "capacity": 5 * GiB}
DISK = {"type": "disk", "path": "~/.cache/kvloom", "capacity": 2 * GiB, "serializer": "raw"}
REMOTE = {"type": "redis", "url": "redis://localhost:65432", "serializer": "raw"}


def test_from_legacy_has_the_seeds_signature() -> None:
    signature = inspect.signature(EngineConfig.from_legacy)
    parameters = [f"{p.name}: {p.annotation} = {p.default!r}" for p in signature.parameters.values()]
    assert ", ".join(parameters) == FROM_LEGACY


def test_every_field_of_the_seed_has_a_row() -> None:
    assert set(FIELDS) == set(FROM_DEFAULTS)
    rows = {name: field.default for name, field in FIELDS.items()}
    assert rows == FROM_DEFAULTS | {"remote_url": None}


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("cpu", [MEMORY]),
        ("local_disk", [DISK]),
        ("local_cpu_disk", [MEMORY, DISK]),
        ("remote", [REMOTE]),
        ("local_cpu_remote", [MEMORY, REMOTE]),
        ("local_disk_remote", [DISK, REMOTE]),
        ("local_cpu_disk_remote", [MEMORY, DISK, REMOTE]),
    ],
)
def test_from_legacy_backends(backend: str, expected: list[dict[str, Any]]) -> None:
    assert tiers(EngineConfig.from_legacy(256, backend, max_local_disk_size=2.0)) == expected


def test_the_backends_are_those_of_the_test_above() -> None:
    assert len(BACKENDS) == 7
    with pytest.raises(ValueError, match="backend: no backend 'gpu'; known: cpu, local_disk, local_cpu_disk, remote,"):
        EngineConfig.from_legacy(backend="gpu")


def test_from_legacy_needs_a_url_only_where_it_says_remote() -> None:
    assert tiers(EngineConfig.from_legacy(backend="cpu", remote_url=None, remote_serde="never heard of it")) == [MEMORY]
    with pytest.raises(ConfigError, match="remote_url: backend 'remote' needs one"):
        EngineConfig.from_legacy(backend="remote", remote_url=None)


def test_from_defaults_takes_the_seeds_fields() -> None:
    config = EngineConfig.from_defaults(
        chunk_size=64,
        local_cpu=True,
        max_local_cpu_size=1.5,
        local_disk="file:///nvme/kv",
        max_local_disk_size=10,
        remote_url="rediss://cache:6380/1",
        remote_serde="cachegen",
        save_decode_cache=True,
        error_handling=False,
    )
    assert (config.chunk_tokens, config.save_decode_cache, config.blend) == (64, True, None)
    assert tiers(config) == [
        {"type": "memory", "capacity": 3 * GiB // 2},
        {"type": "disk", "path": "/nvme/kv", "capacity": 10 * GiB, "serializer": "raw"},
        {"type": "redis", "url": "rediss://cache:6380/1", "serializer": "cachegen"},
    ]


def test_no_remote_store_is_assumed() -> None:
    assert tiers(EngineConfig.from_defaults(chunk_size=64)) == [MEMORY]
    assert tiers(EngineConfig.from_defaults(max_local_cpu_size=5)) == [MEMORY]
    assert tiers(EngineConfig.from_defaults(local_disk="/kv")) == [
        MEMORY,
        {"type": "disk", "path": "/kv", "serializer": "raw"},
    ]


def test_seed_fields_mix_with_ours() -> None:
    config = EngineConfig.from_defaults(chunk_size=64, salt="a", exact=True)
    assert (config.chunk_tokens, config.salt, config.exact) == (64, "a", True)
    with pytest.raises(ConfigError, match=r"^tiers: given twice, as tiers and in LMCache's words: local_disk"):
        EngineConfig.from_defaults(tiers=["memory"], local_disk="/kv")
    with pytest.raises(ConfigError, match=r"^chunk_tokens: given twice"):
        EngineConfig.from_defaults(chunk_tokens=1, chunk_size=1)


@pytest.mark.parametrize(
    ("word", "serializer"),
    [(None, "raw"), ("naive", "raw"), ("fast", "raw"), ("torch", "torch"), ("safetensor", "safetensors")],
)
def test_serdes(word: str | None, serializer: str) -> None:
    (tier,) = tiers(EngineConfig.from_defaults(local_cpu=False, remote_url="lm://h:1", remote_serde=word))
    assert tier == {"type": "redis", "url": "redis://h:1", "serializer": serializer}


def test_blending() -> None:
    fields = {"blend_recompute_ratio": 0.3, "blend_min_tokens": 16}
    assert EngineConfig.from_legacy(**fields).blend is None
    blend = EngineConfig.from_legacy(enable_blending=True, **fields).blend
    assert blend is not None
    assert (blend.executor, blend.retriever.type) == ("cacheblend", "separator")
    assert (blend.settings, blend.min_tokens) == ({"recompute_ratio": 0.3}, 16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"enable_p2p": True}, "lookup_url: enable_p2p needs Mooncake's master"),
        ({"enable_p2p": True, "lookup_url": "host"}, "lookup_url: enable_p2p needs Mooncake's master"),
        ({"enable_p2p": True, "lookup_url": "redis://h:1"}, "lookup_url: enable_p2p needs Mooncake's master"),
        ({"enable_p2p": True, "lookup_url": "10.0.0.1:50051"}, "lookup_url: enable_p2p needs Mooncake's master"),
        ({"remote_url": "infinistore://h:1"}, "remote_url: no store for infinistore://; known: lm, redis"),
        ({"remote_url": "lm://h:1", "remote_serde": "kivi"}, "remote_serde: no serde 'kivi'; known: naive, fast"),
        ({"local_disk": True}, "local_disk: should be a directory, not True"),
        ({"max_local_cpu_size": "5"}, "max_local_cpu_size: should be a number of GiB, not '5'"),
        ({"max_local_cpu_size": -1}, "max_local_cpu_size: should be a number of GiB, not -1"),
        ({"local_disk": "/x", "max_local_disk_size": float("inf")}, "max_local_disk_size: should be a number of GiB"),
        ({"local_cpu": False}, "tiers: at least one tier is needed"),
        ({"chunk_size": 0}, "chunk_tokens: should be greater than or equal to 1, not 0"),
        ({"pipelined_backend": True}, "pipelined_backend: unknown key"),
    ],
)
def test_what_cannot_be_carried_over_says_why(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_defaults(**fields)
    assert str(caught.value).startswith(message)


def test_peers_become_a_pool() -> None:
    config = EngineConfig.from_defaults(
        enable_p2p=True, lookup_url="mooncake://10.0.0.1:50051", distributed_url="tcp://10.0.0.2:8200",
        max_local_cpu_size=2.0,
    )  # fmt: skip
    memory, pool = config.tiers
    assert memory.type == "memory" and pool.type == "mooncake"
    assert pool.model_extra == {"master": "10.0.0.1:50051", "segment": 2 << 30, "local_host": "10.0.0.2"}
    alone = EngineConfig.from_defaults(enable_p2p=True, lookup_url="mooncake://m:1").tiers[1]
    assert alone.model_extra == {"master": "m:1", "segment": 5 << 30}
    assert [tier.type for tier in EngineConfig.from_defaults(lookup_url="m:1").tiers] == ["memory"]
