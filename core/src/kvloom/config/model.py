"""`EngineConfig`: the shape of a configuration as far as the core knows it, and the ways to get one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictStr,
    ValidationError,
    field_validator,
)
from pydantic_core import PydanticCustomError

from kvloom import legacy
from kvloom.config import sources
from kvloom.config.blocks import BlendBlock, Block, MemoryBlock, PluginsBlock, StoredBlock, TierBlock, Word, no_bool
from kvloom.config.problems import KeyPath, Origins, problems, unknown
from kvloom.errors import ConfigError


class EngineConfig(BaseModel):
    """Everything that one engine is opened with. Make one with `from_file`, `from_env`, `from_defaults` or `load`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instance_id: Word = "kvloom"
    chunk_tokens: Annotated[int, Field(ge=1), BeforeValidator(no_bool)] = 256
    """Tokens per chunk: the unit that is kept, found and moved."""
    tokens: Block = Block(type="chunked")
    connector: Block = Block(type="plain")
    tiers: tuple[TierBlock, ...] = (MemoryBlock(),)
    """Fast to slow."""
    blend: BlendBlock | None = None
    observers: tuple[Block, ...] = ()
    save_decode_cache: bool = False
    """Keep the KV of generated tokens too."""
    exact: bool = False
    """Serve nothing that went through a lossy serializer."""
    salt: StrictStr = ""
    """Whose KV this is, where a call does not say: KV is never shared between salts."""
    plugins: PluginsBlock = PluginsBlock()

    _origins: Origins = PrivateAttr(default_factory=Origins)

    @field_validator("tiers", mode="after")
    @classmethod
    def _ordered(cls, tiers: tuple[MemoryBlock | StoredBlock, ...]) -> tuple[MemoryBlock | StoredBlock, ...]:
        if not tiers:
            raise PydanticCustomError("kvloom", "at least one tier is needed, such as [memory]")
        seen: dict[str, int] = {}
        for index, tier in enumerate(tiers):
            if index and isinstance(tier, MemoryBlock):
                why = "there is one already" if isinstance(tiers[0], MemoryBlock) else "it must come first"
                raise _at(index, "type", f"a memory tier cannot be here: {why}")
            if tier.name in seen:
                raise _at(index, "name", f"tiers.{seen[tier.name]} is called {tier.name!r} too; set another `name`")
            seen[tier.name] = index
            _check_bounds(index, tier, in_memory=isinstance(tiers[0], MemoryBlock))
        return tiers

    # -- where one comes from ------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | EngineConfig) -> EngineConfig:
        """From the path of a YAML file, a mapping of the same shape, or a config.

        Raises ConfigError, and TypeError for anything else.
        """
        if isinstance(source, EngineConfig):
            return source
        if isinstance(source, Mapping):
            return cls._built(source)
        if isinstance(source, str | Path):
            return cls.from_file(source)
        raise TypeError(
            "config: expected the path of a YAML file (str or Path), a mapping or an EngineConfig, "
            f"got {type(source).__name__}"
        )

    @classmethod
    def from_file(cls, path: str | Path) -> EngineConfig:
        """From a YAML file; KVLOOM_ environment variables come on top. Raises ConfigError."""
        return cls._built(sources.read(Path(os.path.expanduser(path))), environment=os.environ)

    @classmethod
    def from_env(cls) -> EngineConfig:
        """The defaults and, on top, KVLOOM_ environment variables: `KVLOOM_CHUNK_TOKENS=512`,
        `KVLOOM_TIERS='[{type: memory, capacity: 1GiB}]'` (YAML), `KVLOOM_TIERS__0__CAPACITY=2GiB`.

        Raises ConfigError, also for a KVLOOM_ variable that is no setting.
        """
        return cls._built({}, environment=os.environ)

    @classmethod
    def from_defaults(cls, **fields: Any) -> EngineConfig:
        """The defaults but for `fields`: names of this class, or of LMCache's config (`chunk_size`, `local_disk`, ...).

        Raises ConfigError.
        """
        seed = {name: fields.pop(name) for name in list(fields) if name in legacy.FIELDS}
        translated = legacy.translate(seed)
        if twice := sorted(translated.keys() & fields.keys()):
            raise ConfigError(twice[0], f"given twice, as {twice[0]} and in LMCache's words: {', '.join(sorted(seed))}")
        return cls._built(translated | fields)

    @classmethod
    def from_legacy(
        cls,
        chunk_size: int = 256,
        backend: str = "cpu",
        remote_url: str | None = "lm://localhost:65432",
        remote_serde: str = "naive",
        save_decode_cache: bool = False,
        enable_blending: bool = False,
        blend_recompute_ratio: float = 0.15,
        blend_min_tokens: int = 256,
        max_local_disk_size: float = 0.0,
        enable_p2p: bool = False,
        lookup_url: str | None = None,
        distributed_url: str | None = None,
        error_handling: bool = False,
    ) -> EngineConfig:
        """From the arguments of LMCache's `from_legacy`, with their names, order and defaults.

        backend: cpu, local_disk, local_cpu_disk, remote, local_cpu_remote, local_disk_remote or
        local_cpu_disk_remote; `remote_url` and `remote_serde` count only where it says remote. Raises ConfigError.
        """
        fields = {name: value for name, value in locals().items() if name in legacy.FIELDS}
        return cls._built(legacy.translate(legacy.local_fields(backend, fields)))

    @classmethod
    def _built(cls, tree: Mapping[str, Any], *, environment: Mapping[str, str] | None = None) -> EngineConfig:
        tree, variables = sources.overridden(tree, environment or {}, defaults=_defaults())
        tree, templates, secrets = sources.interpolated(tree, os.environ)
        origins = Origins(templates, variables, secrets)
        try:
            config = cls.model_validate(tree)
        except ValidationError as error:
            found = [(_without_tag(path), text) for path, text in problems(error, stray=_stray)]
            raise origins.error(found) from None
        config._origins = origins
        return config

    @property
    def origins(self) -> Origins:
        """Where values came from that the file does not hold itself."""
        return self._origins


@cache
def _defaults() -> dict[str, Any]:
    """Every default as YAML would say it."""
    return EngineConfig().model_dump(mode="json")


def _check_bounds(index: int, tier: MemoryBlock | StoredBlock, *, in_memory: bool) -> None:
    """Raises what a tier's own settings say against each other."""
    for salt, nbytes in (tier.quota or {}).items():
        if tier.capacity is None:
            raise _at(index, "quota", "a quota is a part of the tier's capacity, which is not set; set `capacity`")
        if nbytes > tier.capacity:
            size, most = nbytes.human_readable(), tier.capacity.human_readable()
            raise _at(index, "quota", f"{size} for {salt!r} is more than the tier's capacity ({most}); lower it")
    if isinstance(tier, MemoryBlock):
        return
    if tier.write == "never":
        for key, value in (("capacity", tier.capacity), ("quota", tier.quota)):
            if value is not None:
                raise _at(
                    index, key, "a tier with `write: never` is only read; those who fill it set its bounds; remove it"
                )
    if tier.write == "on_evict" and not in_memory:
        raise _at(
            index, "write", "'on_evict' writes what the memory tier lets go, and there is none; put `memory` first"
        )
    if tier.policy == "tiny_lfu" and tier.capacity is None:
        raise _at(index, "policy", "'tiny_lfu' decides what a full tier takes in; set `capacity`, or remove it")


def _at(index: int, key: str, text: str) -> PydanticCustomError:
    return PydanticCustomError("kvloom", "{text}", {"text": text, "below": (index, key)})


def _without_tag(path: KeyPath) -> KeyPath:
    """pydantic puts which model a tier was checked against behind the tier's index."""
    return path[:2] + path[3:] if path[0] == "tiers" and path[2:3] in (("memory",), ("stored",)) else path


def _stray(path: KeyPath) -> str:
    word = str(path[-1])
    if len(path) == 1 and word in legacy.FIELDS:
        return f"unknown key; LMCache's {word} is {legacy.FIELDS[word].becomes} here"
    model: Any = {"tiers": MemoryBlock, "plugins": PluginsBlock}.get(str(path[0]), EngineConfig)
    return unknown(word, model.model_fields)
