"""Settings of the connector: they are checked before the model loads, and get to its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_fakes import BLOCK, kv_cache_config, vllm_config

from kvloom import ConfigError, Engine, EngineConfig
from kvloom_connector_vllm.configured import Settings, has_shared_tier
from kvloom_connector_vllm.identity import identify

MEMORY = {"type": "memory", "capacity": "1MiB"}


def settings(extra: Any, model: Path, ranks: int = 1) -> EngineConfig:
    one = identify(vllm_config(str(model)), kv_cache_config(), rank=0, about={})
    return Settings.read(extra, ranks=ranks).opened(one.geometry)


def test_a_rank_that_does_not_store_only_reads_what_processes_share(model: Path, tmp_path: Path) -> None:
    disk = {"type": "disk", "path": str(tmp_path), "capacity": "1GiB", "policy": "tiny_lfu", "ttl": "7d"}
    read = Settings.read({"config": {"tiers": [MEMORY, disk, "dict"]}}, ranks=2)
    one = identify(vllm_config(str(model)), kv_cache_config(), rank=0, about={})
    both, second = read.opened(one.geometry), read.opened(one.geometry, stores=False)
    assert second.tiers[::2] == both.tiers[::2], "of memory and of its own store"
    before, after = (config.tiers[1].model_dump() for config in (both, second))
    changed = {"write": "never", "policy": "lru", "capacity": None}
    assert after == {**before, **changed} != before
    Engine.open(second, one.spec).close()


@pytest.mark.parametrize(("extra", "said"), [
    ({}, "kv_connector_extra_config.config: missing"),
    ({"config": {}, "asynch_load": 1}, "kv_connector_extra_config.asynch_load: unknown"),
    ({"config": {}, "async_load": "no"}, "kv_connector_extra_config.async_load: expected true or false"),
    ({"config": {}, "by_layer": True}, "kv_connector_extra_config.by_layer: goes with"),
    ({"config": {}, "async_load": False, "by_layer": 1}, "kv_connector_extra_config.by_layer: expected true or false"),
    ({"config": "/nowhere/kv.yaml"}, "/nowhere/kv.yaml"),
    ({"config": None}, "config: expected the path of a YAML file"),
    ({"config": {"chunk_tokens": 10}}, "chunk_tokens: 10 is no multiple of vLLM's block size, 4; write 8"),
    ({"config": {"connector": "transformers"}}, "connector: 'transformers' does not read vLLM's memory"),
    ({"config": {"tokens": "radix"}}, "tokens: vLLM's own block hashes"),
    ({"config": {"blend": {"executor": "cacheblend", "retriever": "separator"}}}, "blend: "),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused_with_their_path(model: Path, extra: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(extra, model)


def test_several_ranks_load_while_others_compute(model: Path) -> None:
    with pytest.raises(ConfigError, match="async_load"):
        settings({"config": {}, "async_load": False}, model, ranks=2)
    assert Settings.read({"config": {}}, ranks=2).async_load


def test_the_connector_gets_its_geometry(model: Path, tmp_path: Path) -> None:
    config = settings({"config": {"tiers": ["memory"]}}, model)
    assert config.connector.settings["geometry"]["page_elements"] == 2 * BLOCK * 16
    assert not has_shared_tier(config)
    shared = {"config": {"tiers": ["memory", {"type": "disk", "path": str(tmp_path)}]}}
    assert has_shared_tier(settings(shared, model))
