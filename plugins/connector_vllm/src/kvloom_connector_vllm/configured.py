"""The YAML file that `kv_connector_extra_config` names, and what of it means something inside vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvloom import ConfigError, EngineConfig, MemoryFormat, Registry, check_config

from .offload.setup import OffloadSettings
from .paged.blocks import VLLMBlobConnector, VLLMConnector
from .paged.settings import Geometry

_EXTRA = {"config", "async_load"}


_TYPES = {one.type: one for one in (VLLMConnector, VLLMBlobConnector)}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of both halves."""

    engine: EngineConfig
    async_load: bool
    connector: type[VLLMConnector]

    @classmethod
    def read(cls, extra: Mapping[str, Any], *, ranks: int) -> Settings:
        """Raises ConfigError, with the path of what cannot work and what to do."""
        where = "kv_connector_extra_config"
        unknown = sorted(set(extra) - _EXTRA)
        if unknown:
            raise ConfigError(f"{where}.{unknown[0]}", f"unknown key; there are {', '.join(sorted(_EXTRA))}")
        if "config" not in extra:
            raise ConfigError(f"{where}.config", "missing: the path of a YAML file (docs/use/vllm.md has one)")
        asynchronous = extra.get("async_load", True)
        if not isinstance(asynchronous, bool):
            raise ConfigError(f"{where}.async_load", f"expected true or false, got {asynchronous!r}")
        if not asynchronous and ranks > 1:
            text = "with several ranks one cannot know in time that another's load failed; remove it"
            raise ConfigError(f"{where}.async_load", text)
        config = EngineConfig.load(extra["config"])
        word = config.connector.type
        if word not in _TYPES and word != EngineConfig().connector.type:
            raise ConfigError("connector", f"{word!r} does not read vLLM's memory; write {' or '.join(_TYPES)}")
        if config.tokens.type != "chunked":
            raise ConfigError("tokens", "vLLM's own block hashes name the chunks; remove this block")
        if config.blend is not None:
            raise ConfigError("blend", "vLLM only reuses KV of prefixes; remove this block")
        return cls(config, asynchronous, _TYPES.get(word, VLLMConnector))

    @property
    def pages(self) -> bool:
        """Pages are kept as they are."""
        return self.connector.format is MemoryFormat.KV_PAGES

    def opened(self, geometry: Geometry) -> EngineConfig:
        """The configuration of an engine whose pages look like that. ConfigError if its chunks are no whole blocks."""
        config = self.engine
        if config.chunk_tokens % geometry.block_tokens:
            text = f"{config.chunk_tokens} is no multiple of vLLM's block size, {geometry.block_tokens}"
            best = max(1, round(config.chunk_tokens / geometry.block_tokens)) * geometry.block_tokens
            raise ConfigError("chunk_tokens", f"{text}; write {best}")
        block = type(config.connector)(type=self.connector.type, geometry=geometry.model_dump())
        return config.model_copy(update={"connector": block})


def check_offloading(extra: Mapping[str, Any]) -> None:
    """Raise ConfigError for kvloom's part in vLLM's own offloading: the spec, or a tier below the host memory."""
    if extra.get("spec_name") == "KVLoomOffloadingSpec":
        check_config(EngineConfig.load(OffloadSettings.read(extra).config))
    tiers = extra.get("secondary_tiers")
    for number, tier in enumerate(tiers if isinstance(tiers, list) else ()):
        if isinstance(tier, Mapping) and tier.get("type") == "KVLoomTier":
            if "config" not in tier:
                where = f"kv_connector_extra_config.secondary_tiers.{number}.config"
                raise ConfigError(where, "missing: the path of a YAML file (docs/use/vllm.md has one)")
            check_config(EngineConfig.load(tier["config"]))


def has_shared_tier(config: EngineConfig) -> bool:
    """Return whether a process that holds no KV itself can ask a tier about its content."""
    registry = Registry.discover(only=config.plugins.only, block=config.plugins.block)
    return any(block.type != "memory" and registry.get("backend", block.type).shared for block in config.tiers)
