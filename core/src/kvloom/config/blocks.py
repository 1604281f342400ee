"""The blocks of a configuration: which keys are the core's, and what may stand in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeInt,
    PrivateAttr,
    StrictStr,
    StringConstraints,
    Tag,
    model_validator,
)

from kvloom.config.validation_errors import Origins
from kvloom.contracts.component import ByteSize, Config, Duration
from kvloom.redaction import masked

_MAX_BYTES = 1 << 50
_MAX_SECONDS = 10 * 366 * 86400.0


def no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"should be a number, not {str(value).lower()}")
    return value


def _positive(value: Any) -> Any:
    if not 0 < value < math.inf:
        raise ValueError(f"should be more than nothing and finite, not {value}")
    return value


def _plausible(value: ByteSize) -> ByteSize:
    if value > _MAX_BYTES:
        raise ValueError(f"should be at most 1PiB, not {value.human_readable()}; check the unit")
    return value


def _within_reason(value: float) -> float:
    if value > _MAX_SECONDS:
        raise ValueError(f"should be at most ten years, not {value} seconds; check the unit")
    return value


def _by_salt(value: Any) -> Any:
    """One size is every salt's."""
    return value if value is None or isinstance(value, Mapping) else {"*": value}


Word = Annotated[StrictStr, StringConstraints(min_length=1)]
Size = Annotated[ByteSize, BeforeValidator(no_bool), AfterValidator(_positive), AfterValidator(_plausible)]
TierName = Annotated[StrictStr, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$")]
Seconds = Annotated[Duration, BeforeValidator(no_bool), AfterValidator(_positive), AfterValidator(_within_reason)]
Quota = Annotated[dict[StrictStr, Size], BeforeValidator(_by_salt), Field(min_length=1)]
"""Bytes by salt; `*` for the salts that are not named."""


class Open(BaseModel):
    """A block with settings that only a plugin understands, so that any of them may be a secret."""

    model_config = ConfigDict(extra="allow", frozen=True)
    _origins: Origins = PrivateAttr(default_factory=Origins)

    def came_from(self, origins: Origins) -> None:
        """Say where values came from: those of `${env:NAME}` are not shown."""
        self._origins = origins
        for value in dict(self).values():
            if isinstance(value, Open):
                value.came_from(origins)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, self._origins.masked_tree(masked(value, name))


class Block(Open):
    """`{type: word, ...}`, or the bare word: which plugin, and settings that only it understands."""

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


class ProtectBlock(Config):
    """Whose blobs a tier takes: those of the holders of a key."""

    mode: Literal["sign", "encrypt"] = "sign"
    """sign: others cannot write what is taken. encrypt: nor can they read it."""
    keys: Word
    """A file, or `env:NAME`: keys of 32 bytes in base64, one on each line. The first is written with, all are taken."""


class StoredBlock(Block):
    """A tier on a storage backend: the keys that the core owns."""

    name: TierName = ""
    """What `search_range`, events and metrics call it; the type unless given."""
    serializer: SerializerBlock = SerializerBlock()
    """How chunks are encoded: a word, or a block with settings."""
    write: Literal["through", "on_evict", "never"] = "through"
    """When chunks are written here: as they are stored, when memory lets go of them, or never (others fill it)."""
    capacity: Size | None = None
    """How many bytes it may hold."""
    policy: Literal["lru", "tiny_lfu"] = "lru"
    """What goes when it is full: the least recently used; with tiny_lfu, unless what would come in is used less."""
    deadline: Seconds = 10.0
    """Give an operation up after this long and serve a miss."""
    ttl: Seconds | None = None
    """Serve nothing that was stored longer ago."""
    quota: Quota | None = None
    """How many bytes of `capacity` one salt may hold."""
    remember: Seconds | None = None
    """Take for granted so long what a store that others share, or that evicts by itself, has or lacks.

    Default: 30 seconds for what it has; what it lacks is asked about each time.
    """
    protect: ProtectBlock | None = None
    """Take only blobs that were written with a key of ours."""

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
    """What `search_range`, events and metrics call it."""
    capacity: Size = ByteSize(5 << 30)
    """How far the host pool may grow."""
    deadline: Seconds = 10.0
    """Give up waiting for room after this long."""
    ttl: Seconds | None = None
    """Serve nothing that was stored longer ago."""
    quota: Quota | None = None
    """How many bytes of `capacity` one salt may hold."""

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


class BlendBlock(Open):
    """Blending: what merges, what finds, from which length of prompt on, and the settings of what merges."""

    executor: Word = "cacheblend"
    """What decides which tokens are computed again, and merges the rest."""
    retriever: Block = Block(type="separator")
    """What finds stored KV for the parts of a prompt: a word, or a block with settings."""
    min_tokens: NonNegativeInt = 256
    """Shorter prompts are computed as they would be without blending."""

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
    """All but these."""
