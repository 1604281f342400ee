"""The YAML file that `kv_connector_extra_config` names, and what of it means something inside vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any

from kvloom import ConfigError, EngineConfig, MemoryFormat, Registry, check_config

from .identity import Identity
from .offload.setup import OffloadSettings
from .paged.blobs import VLLMBlobConnector
from .paged.blocks import VLLMConnector
from .paged.settings import Geometry
from .scheduling.plan import Group

_WHERE = "kv_connector_extra_config"
_EXTRA = {"config", "async_load", "by_layer"}
_MISSING = "missing: the path of a YAML file (docs/use/vllm.md has one)"

_TYPES = {one.type: one for one in (VLLMConnector, VLLMBlobConnector)}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of both halves."""

    engine: EngineConfig
    async_load: bool
    connector: type[VLLMConnector]
    by_layer: bool = False
    """A step computes a layer while the next ones are being loaded."""
    shards: int = 0
    """See `identify_groups`."""

    @classmethod
    def read(cls, extra: Mapping[str, Any], *, ranks: int) -> Settings:
        """Raises ConfigError, with each path of what cannot work and what to do. ranks: of all stages together."""
        known = ", ".join(sorted(_EXTRA))
        problems = [(f"{_WHERE}.{name}", f"unknown key; there are {known}") for name in sorted(set(extra) - _EXTRA)]
        asynchronous, by_layer = extra.get("async_load", True), extra.get("by_layer", False)
        for name, value in (("async_load", asynchronous), ("by_layer", by_layer)):
            if not isinstance(value, bool):
                problems.append((f"{_WHERE}.{name}", f"expected true or false, got {value!r}"))
        if asynchronous is False and ranks > 1:
            text = "with several ranks one cannot know in time that another's load failed; remove it"
            problems.append((f"{_WHERE}.async_load", text))
        if by_layer is True and asynchronous is True:
            problems.append((f"{_WHERE}.by_layer", 'goes with "async_load": false, where a step waits for its KV'))
        if "config" not in extra:
            problems.append((f"{_WHERE}.config", _MISSING))
        try:
            config = EngineConfig.load(extra.get("config", {}))
        except ConfigError as error:
            raise ConfigError.of_all([*problems, (error.path, error.problem)]) from None
        word = config.connector.type
        if word not in _TYPES and word != EngineConfig().connector.type:
            problems.append(("connector", f"{word!r} does not read vLLM's memory; write {' or '.join(_TYPES)}"))
        if config.tokens.type != "chunked":
            problems.append(("tokens", "vLLM's own block hashes name the chunks; remove this block"))
        if config.blend is not None:
            problems.append(("blend", "vLLM only reuses KV of prefixes; remove this block"))
        kind = _TYPES.get(word, VLLMConnector)
        shards = config.connector.settings.get("shards", 0)
        if shards and kind is VLLMConnector:
            text = "opaque pages are only of use to as many ranks; write {type: vllm_blob, ...}"
            problems.append(("connector.shards", text))
        elif isinstance(shards, bool) or not isinstance(shards, int) or shards < 0:
            problems.append(("connector.shards", f"expected a number of parts, got {shards!r}"))
        if problems:
            raise ConfigError.of_all(problems)
        return cls(config, asynchronous, kind, by_layer, shards)

    @property
    def pages(self) -> bool:
        """Pages are kept as they are."""
        return self.connector.format is MemoryFormat.KV_PAGES

    def opened(self, geometry: Geometry, *, stores: bool = True) -> EngineConfig:
        """The configuration of an engine whose pages look like that. ConfigError if its chunks are no whole blocks.

        stores: False if another rank stores the same KV; tiers that processes share are only read then.
        """
        self._whole(geometry.block_tokens)
        settings = {**self.engine.connector.settings, "geometry": geometry.model_dump()}
        block = type(self.engine.connector)(type=self.connector.type, **settings)
        tiers = self.engine.tiers
        if not stores:
            only_read = {"write": "never", "policy": "lru", "capacity": None, "quota": None}
            is_shared = _shared(self.engine)
            tiers = tuple(tier.model_copy(update=only_read) if is_shared(tier) else tier for tier in tiers)
        return self.engine.model_copy(update={"connector": block, "tiers": tiers})

    def groups(self, identities: Sequence[Identity]) -> tuple[Group, ...]:
        """The groups of layers, in the same order. ConfigError if chunks are no whole blocks of each, or for a
        setting that goes with full attention only."""
        blocks = lcm(*(one.geometry.block_tokens for one in identities))
        self._whole(blocks)
        if self.by_request(identities) and not self.async_load:
            text = "with windows, states or several groups of KV cache, a request has to wait for its KV; remove it"
            raise ConfigError(f"{_WHERE}.async_load", text)
        if any(one.state for one in identities) and not (self.engine.save_tails or self.engine.chunk_tokens == blocks):
            text = (
                f"states are kept at the ends of prompts, where no chunk ends; remove it, or set chunk_tokens: {blocks}"
            )
            raise ConfigError("save_tails", text)
        return tuple(
            Group.of(
                one.geometry.block_tokens, most=self.engine.chunk_tokens, hash_tokens=one.hash_tokens,
                window=one.window, span=one.span, state=one.state,
            )
            for one in identities
        )  # fmt: skip

    @staticmethod
    def by_request(identities: Sequence[Identity]) -> bool:
        """A request cannot go on behind a block that was not loaded, because vLLM has given up others before it."""
        return len(identities) > 1 or any(one.window or one.span or one.state for one in identities)

    def _whole(self, block_tokens: int) -> None:
        chunk = self.engine.chunk_tokens
        if chunk % block_tokens:
            text = f"{chunk} is no multiple of vLLM's block size, {block_tokens}"
            best = max(1, round(chunk / block_tokens)) * block_tokens
            raise ConfigError("chunk_tokens", f"{text}; write {best}")


def check_offloading(extra: Mapping[str, Any]) -> None:
    """Raise ConfigError for kvloom's part in vLLM's own offloading: the spec, or a tier below the host memory."""
    problems: list[tuple[str, str]] = []
    if extra.get("spec_name") == "KVLoomOffloadingSpec":
        problems += _problems_of(lambda: _check(OffloadSettings.read(extra).config))
    tiers = extra.get("secondary_tiers")
    for number, tier in enumerate(tiers if isinstance(tiers, list) else ()):
        if isinstance(tier, Mapping) and tier.get("type") == "KVLoomTier":
            if "config" not in tier:
                problems.append((f"{_WHERE}.secondary_tiers.{number}.config", _MISSING))
            else:
                problems += _problems_of(partial(_check, tier["config"]))
    if problems:
        raise ConfigError.of_all(problems)


def _check(config: Any) -> None:
    check_config(EngineConfig.load(config))


def _problems_of(check: Callable[[], object]) -> list[tuple[str, str]]:
    """The problem that `check` raises, if any."""
    try:
        check()
    except ConfigError as error:
        return [(error.path, error.problem)]
    return []


def has_shared_tier(config: EngineConfig) -> bool:
    """Return whether a process that holds no KV itself can ask a tier about its content."""
    return any(map(_shared(config), config.tiers))


def _shared(config: EngineConfig) -> Callable[[Any], bool]:
    """Return the predicate that says of a tier's block whether processes share the tier."""
    registry = Registry.discover(only=config.plugins.only, block=config.plugins.block)
    return lambda tier: tier.type != "memory" and registry.get("backend", tier.type).shared
