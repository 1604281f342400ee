"""`EngineConfig`: the shape of a configuration as far as the core knows it, and the ways to get one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
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

from kvloom.config import legacy, sources
from kvloom.config.blocks import (
    BlendBlock,
    ComponentBlock,
    MemoryBlock,
    Open,
    PluginsBlock,
    ProtectBlock,
    StoredBlock,
    TierBlock,
    Word,
    no_bool,
)
from kvloom.config.cross_checks import cross_checks
from kvloom.config.further_errors import further_errors
from kvloom.config.validation_errors import KeyPath, Origins, Problem, problems, unknown
from kvloom.errors import ConfigError
from kvloom.redaction import MASK


class EngineConfig(BaseModel):
    """Everything that one engine is opened with. Make one with `from_file`, `from_env`, `from_defaults` or `load`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instance_id: Word = "kvloom"
    """The engine's name for observers: the label `engine` of metrics."""
    chunk_tokens: Annotated[int, Field(ge=1, le=1 << 20), BeforeValidator(no_bool)] = 256
    """Tokens per chunk: the unit that is kept, found and moved."""
    tokens: ComponentBlock = ComponentBlock(type="chunked")
    """The component that cuts sequences into chunks: a word, or a block with settings."""
    connector: ComponentBlock = ComponentBlock(type="plain")
    """The engine whose KV is read and written: a word, or a block with settings."""
    tiers: tuple[TierBlock, ...] = (MemoryBlock(),)
    """Fast to slow."""
    blend: BlendBlock | None = None
    """Reuse of KV wherever a passage stands in a prompt."""
    observers: tuple[ComponentBlock, ...] = ()
    """The observers that events are sent to: words, or blocks with settings."""
    save_decode_cache: bool = False
    """Keep the KV of generated tokens too."""
    save_tails: bool = True
    """Keep what a prompt has behind its last whole chunk, too, in pieces that longer prompts find."""
    exact: bool = False
    """Serve nothing that went through a lossy serializer."""
    salt: StrictStr = ""
    """The owner of the KV, unless a call gives one. KV is never shared between salts."""
    plugins: PluginsBlock = PluginsBlock()
    """The plugins that may load."""

    _origins: Origins = PrivateAttr(default_factory=Origins)

    @field_validator("tiers", mode="after")
    @classmethod
    def _ordered(cls, tiers: tuple[MemoryBlock | StoredBlock, ...]) -> tuple[MemoryBlock | StoredBlock, ...]:
        found = cross_checks(tiers)
        if found:
            text = "; ".join(text for _, text in found)
            raise PydanticCustomError("kvloom", "{text}", {"text": text, "found": found})
        return tiers

    # -- where one comes from ------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | EngineConfig) -> EngineConfig:
        """From the path of a YAML file, a mapping of the same shape, or a config.

        Raises ConfigError, also for anything else: in an engine's settings it may be whatever JSON can say.
        """
        if isinstance(source, EngineConfig):
            return source
        if isinstance(source, Mapping):
            return cls._built(source)
        if isinstance(source, str | Path) and source != "":
            return cls.from_file(source)
        got = "nothing" if source in (None, "") else type(source).__name__
        raise ConfigError("config", f"expected the path of a YAML file, a mapping or an EngineConfig, got {got}")

    @classmethod
    def from_file(cls, path: str | Path) -> EngineConfig:
        """From a YAML file; KVLOOM_ environment variables come on top. Raises ConfigError.

        Relative paths in the file begin where the file is.
        """
        file = Path(os.path.expanduser(path))
        tree, twice = sources.read(file)
        return cls._built(tree, twice, environment=os.environ, directory=Path(os.path.abspath(file)).parent)

    @classmethod
    def from_env(cls) -> EngineConfig:
        """The defaults and, on top, KVLOOM_ environment variables: `KVLOOM_CHUNK_TOKENS=512`,
        `KVLOOM_TIERS='[{type: memory, capacity: 1GiB}]'` (YAML), `KVLOOM_TIERS__0__CAPACITY=2GiB`.

        Raises ConfigError, also for a KVLOOM_ variable that is not a setting.
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

        chunk_size: tokens. max_local_disk_size: GiB, as there.

        backend: cpu, local_disk, local_cpu_disk, remote, local_cpu_remote, local_disk_remote or
        local_cpu_disk_remote; `remote_url` and `remote_serde` count only where it says remote. Raises ConfigError.
        """
        fields = {name: value for name, value in locals().items() if name in legacy.FIELDS}
        return cls._built(legacy.translate(legacy.local_fields(backend, fields)))

    @classmethod
    def _built(
        cls, tree: Mapping[str, Any], twice: Sequence[Problem] = (), *,
        environment: Mapping[str, str] | None = None, directory: Path | None = None,
    ) -> EngineConfig:  # fmt: skip
        tree, variables, wrong = sources.overridden(tree, environment or {}, defaults=_defaults())
        tree, templates, secrets, missing = sources.interpolated(sources.traced(tree, os.environ), os.environ)
        found = [*twice, *wrong, *missing]
        origins = Origins(templates, variables, secrets, directory)
        empty = {path for path, _ in found}  # what could not be filled in, or is given twice, says nothing more
        try:
            config = cls.model_validate(tree)
        except ValidationError as error:
            shape = [(_without_tag(path), text) for path, text in problems(error, stray=_stray)]
            found += [(path, text) for path, text in shape if path not in empty]
        if found:
            raise origins.error([*found, *further_errors(tree, found, origins)])
        config._origins = origins
        for value in (config.tokens, config.connector, *config.tiers, *config.observers, config.blend):
            if isinstance(value, Open):
                value.came_from(origins)
        return config

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, MASK if name == "salt" and value else self._origins.masked_tree(value)

    @property
    def origins(self) -> Origins:
        """The origins of the values that the file does not hold itself."""
        return self._origins


@cache
def _defaults() -> dict[str, Any]:
    """Every default as YAML would say it."""
    return EngineConfig().model_dump(mode="json")


def _without_tag(path: KeyPath) -> KeyPath:
    """pydantic puts which model a tier was checked against behind the tier's index."""
    return path[:2] + path[3:] if path[:1] == ("tiers",) and path[2:3] in (("memory",), ("stored",)) else path


def _stray(path: KeyPath) -> str:
    word = str(path[-1])
    if len(path) == 1 and word in legacy.FIELDS:
        return f"unknown key; LMCache's {word} is {legacy.FIELDS[word].becomes} here"
    if "protect" in path[:-1]:
        return unknown(word, ProtectBlock.model_fields)
    model: Any = {"tiers": MemoryBlock, "plugins": PluginsBlock}.get(str(path[0]), EngineConfig)
    return unknown(word, model.model_fields)
