"""Blocks of a configuration against the plugins that they name."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kvloom.config.blocks import BlendBlock, ComponentBlock, MemoryBlock, ProtectBlock, StoredBlock
from kvloom.config.paths import absolute, absolute_paths, homeless, is_homeless
from kvloom.config.validation_errors import KeyPath, Origins, Problem, dotted, problems, unknown
from kvloom.contracts.component import Config
from kvloom.errors import ConfigError, PluginError
from kvloom.plugins.kinds import KINDS
from kvloom.plugins.registry import Registry
from kvloom.redaction import looks_like_a_key

if TYPE_CHECKING:
    from kvloom.format.encryption import Protection
    from kvloom.types import KVSpec


@dataclass(frozen=True, slots=True)
class Choice:
    """A component that the configuration asks for: its class and its settings."""

    path: str
    """The block's place in the YAML."""
    type: str
    """The word in the YAML; "" for a block that is wrong."""
    config: Config
    load: Callable[[], builtins.type[Any]] = field(repr=False, compare=False)
    """Returns its class, which may import it."""
    origins: Origins = field(default_factory=Origins, repr=False, compare=False)

    @property
    def cls(self) -> builtins.type[Any]:
        return self.load()

    def make(self, spec: KVSpec | None = None, **kwargs: Any) -> Any:
        """A new instance. ConfigError, with the path, if the constructor cannot work with these settings."""
        with self.blamed():
            return self.cls(self.config, spec, **kwargs)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Turn an error raised within, caused by these settings, into a ConfigError with the path."""
        try:
            yield
        except (ValueError, OSError, ImportError) as error:
            path = dotted((self.path, error.path)) if isinstance(error, ConfigError) and error.path else self.path
            text = error.problem if isinstance(error, ConfigError) else str(error) or type(error).__name__
            raise ConfigError(path, self.origins.masked(text)) from error
        except (Exception, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # a panic of native code, or an exit, must not end the process
            text = f"{self.type!r} broke off with {type(error).__name__}: {error}"
            raise ConfigError(self.path, self.origins.masked(text)) from error


@dataclass(frozen=True, slots=True)
class TierChoice:
    """One tier, in the order of the YAML."""

    name: str
    path: str
    backend: Choice | None
    """None for the memory tier."""
    serializer: Choice | None
    timed: bool
    """Log how long each encode and decode takes."""
    capacity: int | None
    """In bytes; None for no limit."""
    deadline: float
    """Seconds that one operation may take."""
    ttl: float | None = None
    """Seconds that KV is served for."""
    quota: Mapping[str, int] | None = None
    """Bytes by salt; `*` for those that are not named."""
    write: str = "through"
    """`through`, `on_evict` or `never`."""
    policy: str = "lru"
    """`lru` or `tiny_lfu`."""
    remember: float | None = None
    """Seconds for which existence answers are cached."""
    protection: Protection | None = None
    """The keys whose blobs the tier accepts; None: unsigned blobs."""
    pin: str = "auto"
    """The time at which the memory tier pins its memory: `auto`, `eager` or `never`."""


def same_store(tier: TierChoice, other: TierChoice) -> str:
    """The error text for a tier on the same store as another tier: the problem and the remedy."""
    text = f"{tier.name!r} would be on the same store as {other.path}, {other.name!r}"
    return f"{text}; give it other settings, or remove one"


@dataclass(frozen=True, slots=True)
class BlendChoice:
    executor: Choice
    retriever: Choice
    min_tokens: int


class Checks:
    """Collects all errors, so that one attempt shows everything. Its results only count if there are none."""

    def __init__(self, registry: Registry, origins: Origins, *, imported: bool = True) -> None:
        """imported: import every class, also where the settings are known without it."""
        self.problems: list[Problem] = []
        self._registry = registry
        self._origins = origins
        self._imported = imported

    def _directory(self, at: KeyPath) -> Path:
        """The directory that a relative path at `at` starts in. For a value from a variable: the working directory."""
        return Path.cwd() if self._origins.is_by_variable(at) else self._origins.directory or Path.cwd()

    def check_plugins(self, only: tuple[str, ...]) -> None:
        for index, name in enumerate(only):
            if name not in self._registry.names:
                text = f"no plugin {name!r} is installed; there are: {', '.join(self._registry.names)}"
                self.problems.append((("plugins", "only", index), text))

    def check_stores(self, tiers: Sequence[TierChoice]) -> None:
        """Two tiers on one store would overwrite and evict each other's blobs. Opening finds what settings hide."""
        seen: list[TierChoice] = []
        for index, tier in enumerate(tiers):
            backend = tier.backend
            if backend is None or not backend.type or not (backend.cls.persistent or backend.cls.shared):
                continue
            for other in seen:
                if other.backend == replace(backend, path=other.path):
                    self.problems.append((("tiers", index), same_store(tier, other)))
                    break
            seen.append(tier)

    def block(self, at: KeyPath, kind: str, block: ComponentBlock) -> Choice:
        return self._choose(at, kind, block.type, block.settings, at_type=(*at, "type"))

    def tier(self, at: KeyPath, block: MemoryBlock | StoredBlock) -> TierChoice:
        path = dotted(at)
        if isinstance(block, MemoryBlock):
            return TierChoice(
                block.name, path, None, None, False, block.capacity, block.deadline, block.ttl, block.quota,
                pin=block.pin,
            )  # fmt: skip
        return TierChoice(
            name=block.name,
            path=path,
            backend=self.block(at, "backend", block),
            serializer=self.block((*at, "serializer"), "serializer", block.serializer),
            timed=block.serializer.timed,
            capacity=block.capacity,
            deadline=block.deadline,
            ttl=block.ttl,
            quota=block.quota,
            write=block.write,
            policy=block.policy,
            remember=block.remember,
            protection=self._protection((*at, "protect"), block.protect),
        )

    def _protection(self, at: KeyPath, block: ProtectBlock | None) -> Protection | None:
        if block is None:
            return None
        from kvloom.format.encryption import Protection

        try:
            keys = block.keys
            if not keys.startswith("env:") and not looks_like_a_key(keys):
                if is_homeless(keys):
                    raise ConfigError("keys", f"unknown home directory: {keys}")
                keys = str(absolute(keys, self._directory((*at, "keys"))))
            return Protection.load(block.mode, keys)
        except ConfigError as error:
            self.problems.append(((*at, error.path) if error.path else at, error.problem))
            return None

    def blend(self, block: BlendBlock) -> BlendChoice:
        at = ("blend",)
        return BlendChoice(
            self._choose(at, "blend executor", block.executor, block.settings, at_type=(*at, "executor")),
            self.block((*at, "retriever"), "blend retriever", block.retriever),
            block.min_tokens,
        )

    def _choose(self, at: KeyPath, kind: str, type: str, settings: Mapping[str, Any], *, at_type: KeyPath) -> Choice:
        model = Config
        try:
            if self._imported:
                self._registry.get(kind, type)
            model = self._registry.settings(kind, type)
            if lacking := self._registry.lacks(kind, type):
                self.problems.append((at_type, lacking))
            for name in homeless(model, settings):
                self.problems.append(((*at, name), f"unknown home directory: {settings[name]}"))
            given = absolute_paths(model, settings, lambda name: self._directory((*at, name)))
            config = model.model_validate(given, context={"directory": self._directory(at)})
            return Choice(dotted(at), type, config, partial(self._registry.get, kind, type), self._origins)
        except PluginError as error:
            self.problems.append((at_type, str(error)))
        except ValidationError as error:
            known = {*model.model_fields, *KINDS[kind].owned} - {"type"} | {str(at_type[-1])}

            def stray(path: KeyPath) -> str:
                if path == (*at, "type"):  # of a block whose type has another name
                    return f"unknown key; did you mean {at_type[-1]!r}?"
                return unknown(str(path[-1]), known) if len(path) == len(at) + 1 else "unknown key"

            self.problems.extend(problems(error, at=at, stray=stray))
        return Choice(dotted(at), "", Config(), partial(self._registry.get, kind, type), self._origins)
