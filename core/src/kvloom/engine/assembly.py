"""Assembles an engine or an index: resolves its configuration against the plugins and opens every component."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kvloom.config import EngineConfig, resolve
from kvloom.contracts.connector import GPUConnector
from kvloom.contracts.tokens import TokenDatabase
from kvloom.engine.blending import Blending
from kvloom.engine.builder import asked_only, build_stack
from kvloom.engine.opening import in_time
from kvloom.pipeline.stack import Stack
from kvloom.plugins.registry import Registry
from kvloom.runtime import Runtime, SystemRuntime
from kvloom.telemetry.events import EventBus
from kvloom.tiers.tier import Layout
from kvloom.types import KVSpec


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)
Source = str | Path | Mapping[str, Any] | EngineConfig


@dataclass(frozen=True, slots=True)
class Components:
    """The open parts of an engine or an index."""

    config: EngineConfig
    spec: KVSpec
    stack: Stack
    connector: GPUConnector
    tokens: TokenDatabase
    events: EventBus
    runtime: Runtime
    registry: Registry
    blending: Blending | None
    """The components of the configuration's `blend` block; an index has none."""
    others: tuple[tuple[KVSpec, TokenDatabase], ...]
    """The other ranks of the model, in an index."""


def kept(made: ExitStack, part: T) -> T:
    """Have `made` close a part; return the part."""
    made.callback(part.close)
    return part


def open_components(
    config: Source, spec: KVSpec, made: ExitStack, *, role: str, registry: Registry | None, runtime: Runtime | None
) -> Components:  # fmt: skip
    """Open every component. Raises ConfigError, PluginError, or ValueError for another role.

    made: closes everything that was opened, also if this raises; remove its callbacks once another owner closes the
    parts. role: `engine` or `index`, which moves nothing.
    """
    if role not in ("engine", "index"):
        raise ValueError(f"role: expected 'engine' or 'index', got {role!r}")
    moves = role == "engine"
    config = EngineConfig.load(config)
    runtime = runtime or SystemRuntime()
    registry = registry or Registry.discover(only=config.plugins.only, block=config.plugins.block)
    resolved = resolve(config, registry)
    choices = resolved.tiers if moves else asked_only(resolved.tiers)
    told = [choice for choice in resolved.observers if moves or not choice.cls.sees_chunks]
    connector = kept(made, resolved.connector.make(spec))
    tokens = kept(made, in_time("tokens", partial(resolved.tokens.make, spec), runtime))
    layout = Layout(connector.format, spec.torch_dtype, connector.shape)
    blending = kept(made, Blending.make(resolved.blend, spec)) if resolved.blend and moves else None
    observers = [kept(made, in_time(choice.path, partial(choice.make, spec), runtime)) for choice in told]
    events = kept(made, EventBus(observers, runtime, blamed=[choice.blamed for choice in told]))
    stack = build_stack(
        choices, spec, layout, layout.nbytes(connector.shape(config.chunk_tokens)), registry=registry,
        events=events, runtime=runtime, exact_only=config.exact, moves=moves,
    )  # fmt: skip
    kept(made, stack)
    others = () if moves else tuple((one, kept(made, resolved.tokens.make(one))) for one in spec.other_ranks())
    return Components(config, spec, stack, connector, tokens, events, runtime, registry, blending, others)
