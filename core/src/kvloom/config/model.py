"""`EngineConfig`: the shape of a configuration as far as the core knows it, and the ways to get one."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    StrictStr,
    StringConstraints,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvloom import legacy
from kvloom.config import sources
from kvloom.config.problems import KeyPath, Origins, problems, unknown
from kvloom.contracts.component import ByteSize, Config, Duration
from kvloom.errors import ConfigError


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"should be a number, not {str(value).lower()}")
    return value


def _positive(value: Any) -> Any:
    if not 0 < value < math.inf:
        raise ValueError(f"should be more than nothing and finite, not {value}")
    return value


def _not_yet(value: Any) -> None:
    raise ValueError("not in this release; remove it")


def _no_on_evict(value: Any) -> Any:
    if value == "on_evict":
        raise ValueError("'on_evict' is not in this release; write 'through' or 'never'")
    return value


Word = Annotated[StrictStr, StringConstraints(min_length=1)]
Size = Annotated[ByteSize, BeforeValidator(_no_bool), AfterValidator(_positive)]
Deadline = Annotated[Duration, BeforeValidator(_no_bool), AfterValidator(_positive)]
TierName = Annotated[StrictStr, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$")]
_NotYet = Annotated[None, BeforeValidator(_not_yet)]

_OPEN = ConfigDict(extra="allow", frozen=True)


class Block(BaseModel):
    """`{type: word, ...}`, or the bare word: which plugin, and settings that only it understands."""

    model_config = _OPEN
    type: Word

    @model_validator(mode="before")
    @classmethod
    def _bare_word(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value

    @property
    def settings(self) -> dict[str, Any]:
        """What belongs to the plugin."""
        return dict(self.model_extra or {})


class SerializerBlock(Block):
    """How a tier encodes chunks."""

    type: Word = "raw"
    timed: bool = False
    """Log how long every encode and decode takes."""


class StoredBlock(Block):
    """A tier on a storage backend: the keys that the core owns."""

    name: TierName = ""
    """What `search_range`, events and metrics call it; the type unless given."""
    serializer: SerializerBlock = SerializerBlock()
    write: Annotated[Literal["through", "never"], BeforeValidator(_no_on_evict)] = "through"
    """When chunks are written here: as they are stored, or never (a tier that others fill)."""
    capacity: Size | None = None
    """Evict the least recently used beyond this."""
    deadline: Deadline = 10.0
    """Give an operation up after this long and serve a miss."""
    ttl: _NotYet = None
    quota: _NotYet = None

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        value = {"type": value} if isinstance(value, str) else value
        if isinstance(value, dict) and isinstance(value.get("type"), str):
            return {"name": value["type"], **value}
        return value


class MemoryBlock(Config):
    """The memory tier, the core's own."""

    type: Literal["memory"] = "memory"
    name: TierName = "memory"
    capacity: Size = ByteSize(5 << 30)
    """How far the host pool may grow."""
    deadline: Deadline = 10.0
    """Give up waiting for room after this long."""

    @model_validator(mode="before")
    @classmethod
    def _bare_word(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value


def _tier_model(value: Any) -> str:
    kind = value if isinstance(value, str) else getattr(value, "type", None)
    if isinstance(value, Mapping):
        kind = value.get("type")
    return "memory" if kind == "memory" else "stored"


TierBlock = Annotated[
    Annotated[MemoryBlock, Tag("memory")] | Annotated[StoredBlock, Tag("stored")], Discriminator(_tier_model)
]


class BlendBlock(BaseModel):
    """Blending: what merges, what finds, and the settings of what merges."""

    model_config = _OPEN
    executor: Word = "cacheblend"
    retriever: Block = Block(type="separator")

    @model_validator(mode="before")
    @classmethod
    def _bare_word(cls, value: Any) -> Any:
        return {"executor": value} if isinstance(value, str) else value

    @property
    def settings(self) -> dict[str, Any]:
        """What belongs to the executor."""
        return dict(self.model_extra or {})


class PluginsBlock(Config):
    """Which plugins may load, by the names that `kvloom plugins` lists."""

    only: tuple[Word, ...] | None = None
    """None of the others (the core's own always load)."""
    block: tuple[Word, ...] = ()


class EngineConfig(BaseModel):
    """Everything that one engine is opened with. Make one with `from_file`, `from_env`, `from_defaults` or `load`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instance_id: Word = "kvloom"
    chunk_tokens: Annotated[int, Field(ge=1), BeforeValidator(_no_bool)] = 256
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
        return tiers

    # -- where one comes from ------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | EngineConfig) -> EngineConfig:
        """From the path of a YAML file, a mapping of the same shape, or a config. Raises ConfigError."""
        if isinstance(source, EngineConfig):
            return source
        return cls._built(source) if isinstance(source, Mapping) else cls.from_file(source)

    @classmethod
    def from_file(cls, path: str | Path) -> EngineConfig:
        """From a YAML file; KVLOOM_ environment variables come on top. Raises ConfigError."""
        return cls._built(sources.read(Path(path).expanduser()), environment=os.environ)

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
