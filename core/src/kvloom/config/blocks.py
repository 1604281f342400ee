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

_MAX_SECONDS = 10 * 366 * 86400.0


def no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"should be a number, not {str(value).lower()}")
    return value


def _positive(value: Any) -> Any:
    if not 0 < value < math.inf:
        raise ValueError(f"should be more than nothing and finite, not {value}")
    return value


def _within_reason(value: float) -> float:
    if value > _MAX_SECONDS:
        raise ValueError(f"should be at most ten years, not {value} seconds; check the unit")
    return value


def _by_salt(value: Any) -> Any:
    """One size is every salt's."""
    return value if value is None or isinstance(value, Mapping) else {"*": value}


Word = Annotated[StrictStr, StringConstraints(min_length=1)]
Size = Annotated[ByteSize, BeforeValidator(no_bool), AfterValidator(_positive)]
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

    @property
    def settings(self) -> dict[str, Any]:
        """The plugin's own settings."""
        return dict(self.model_extra or {})

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, self._origins.masked_tree(masked(value, name))


class ComponentBlock(Open):
    """`{type: word, ...}`, or the bare word: which plugin, and settings that only it understands."""

    type: Word

    @model_validator(mode="before")
    @classmethod
    def _bare_word(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value


class SerializerBlock(ComponentBlock):
    """A tier's encoding of chunks."""

    type: Word = "raw"
    timed: bool = False
    """Log how long every encode and decode takes."""


class ProtectBlock(Config):
    """A tier that takes only blobs signed by the holders of a key."""

    mode: Literal["sign", "encrypt"] = "sign"
    """sign: accept only blobs signed with our keys. encrypt: also keep others from reading them."""
    keys: Word
    """A file, or `env:NAME`: 32-byte keys in base64, one a line. New blobs use the first; blobs of all are accepted."""


class StoredBlock(ComponentBlock):
    """A tier on a storage backend: the keys that the core owns."""

    name: TierName = ""
    """The tier's name in `search_range`, events and metrics; the type unless given."""
    serializer: SerializerBlock = SerializerBlock()
    """The encoding of chunks: a word, or a block with settings."""
    write: Literal["through", "on_evict", "never"] = "through"
    """The time of writing: as chunks are stored, when memory evicts them, or never (others fill the tier)."""
    capacity: Size | None = None
    """Maximum number of bytes in the tier."""
    policy: Literal["lru", "tiny_lfu"] = "lru"
    """Eviction when the tier is full: the least recently used goes; `tiny_lfu` refuses a newcomer that is used less."""
    deadline: Seconds = 10.0
    """Give an operation up after this long and serve a miss."""
    ttl: Seconds | None = None
    """Serve nothing that was stored longer ago."""
    quota: Quota | None = None
    """Maximum number of bytes of `capacity` for one salt."""
    remember: Seconds | None = None
    """Cache existence answers of a shared or self-evicting store for this long.

    Default: 30 seconds for blobs that exist; missing ones are checked each time.
    """
    protect: ProtectBlock | None = None
    """Accept only blobs that were written with one of our keys."""

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
    """The tier's name in `search_range`, events and metrics."""
    capacity: Size = ByteSize(5 << 30)
    """Maximum number of bytes in the host pool."""
    deadline: Seconds = 10.0
    """Give up waiting for room after this long."""
    ttl: Seconds | None = None
    """Serve nothing that was stored longer ago."""
    quota: Quota | None = None
    """Maximum number of bytes of `capacity` for one salt."""
    pin: Literal["auto", "eager", "never"] = "auto"
    """Page-lock memory for a GPU: a little ahead of its use, all of it at once, or not at all."""

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
    """Blending: the executor with its settings, the retriever, and the shortest prompt to blend."""

    executor: Word = "hybrid"
    """The component that selects the tokens to compute again, and merges the rest."""
    retriever: ComponentBlock = ComponentBlock(type="separator")
    """The component that finds stored KV for the parts of a prompt: a word, or a block with settings."""
    min_tokens: NonNegativeInt = 256
    """Shorter prompts are computed as they would be without blending."""

    @model_validator(mode="before")
    @classmethod
    def _bare_word(cls, value: Any) -> Any:
        return {"executor": value} if isinstance(value, str) else value


class PluginsBlock(Config):
    """The plugins that may load, by the names that `kvloom plugins` lists."""

    only: tuple[Word, ...] | None = None
    """None of the others (the core's own always load)."""
    block: tuple[Word, ...] = ()
    """All but these."""
