"""Builds the tiers of an engine from its resolved configuration."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvloom.config import EngineConfig, TierChoice, resolve, same_store
from kvloom.contracts.serializer import Serializer
from kvloom.contracts.storage import StorageBackend
from kvloom.engine.opening import in_time
from kvloom.errors import ConfigError
from kvloom.format import envelope
from kvloom.keys import salt_tag
from kvloom.memory import Pool, pages_of
from kvloom.memory.pages import settle_threads
from kvloom.pipeline.stack import Stack
from kvloom.plugins.registry import Registry
from kvloom.runtime import Runtime, SystemRuntime
from kvloom.telemetry.events import EventBus
from kvloom.telemetry.timed_serializer import TimedSerializer
from kvloom.tiers.memory.tier import MemoryTier
from kvloom.tiers.stored.tier import Policy, StoredTier
from kvloom.tiers.tier import Layout, Tier
from kvloom.types import KVSpec, MemoryFormat

log = logging.getLogger(__name__)

STAGING_BYTES = 1 << 30
"""Bytes in the pool of an engine without a memory tier, which holds chunks only while they move."""


def build_stack(
    choices: Sequence[TierChoice], spec: KVSpec, layout: Layout, chunk_bytes: int, *,
    registry: Registry, events: EventBus, runtime: Runtime, exact_only: bool = False, dst_device: str = "cpu",
    moves: bool = True,
) -> Stack:  # fmt: skip
    """All tiers of an engine. Raises ConfigError with the YAML path of what cannot work.

    moves: False for an index, which moves no KV and gets no memory.
    """
    first = next((choice for choice in choices if choice.backend is None), None)
    capacity = STAGING_BYTES if first is None or first.capacity is None else first.capacity
    _refuse([problem for choice in choices for problem in _too_small(choice, chunk_bytes)])
    if first is None:
        capacity = max(capacity, 2 * chunk_bytes + (64 << 10)) if moves else 0
    try:
        pin = "auto" if first is None else first.pin
        pool = Pool(
            capacity, runtime, pin=False if pin == "never" else "auto", eager=pin == "eager", piece_bytes=chunk_bytes
        )
    except (OSError, OverflowError) as error:
        where = "tiers" if first is None else f"{first.path}.capacity"
        raise ConfigError(where, f"cannot allocate {capacity} bytes of memory ({error}); lower it") from error
    memory = MemoryTier(
        layout, pool, events, runtime, keep=first is not None, dst_device=dst_device,
        name="memory" if first is None else first.name, deadline=10.0 if first is None else first.deadline,
        ttl=None if first is None else first.ttl, quota=None if first is None else _by_tag(first.quota),
    )  # fmt: skip
    memory.closes_too(pool.close)
    raw = registry.get("serializer", "raw")
    stored: list[StoredTier] = []
    places: dict[tuple[str, str], TierChoice] = {}
    wrong: list[ConfigError] = []
    try:
        for choice in choices:
            if choice.backend is None:
                continue
            try:
                serializers = _serializers(choice, spec, layout.format, raw, runtime, exact_only=exact_only)
                policy = _policy(choice, exact_only=exact_only)
                opening = partial(_opened, choice, spec, places, pool)
                backend = in_time(choice.path, opening, runtime, seconds=choice.deadline)
            except ConfigError as error:  # the other tiers may have mistakes too
                wrong.append(error)
                continue
            try:
                tier = StoredTier(
                    choice.name, layout, backend, serializers, memory, events, runtime,
                    policy=policy, dst_device=dst_device,
                )  # fmt: skip
            except BaseException:
                backend.close()
                raise
            stored.append(tier)
        if len(wrong) == 1:
            raise wrong[0]
        _refuse([(error.path, error.problem) for error in wrong])
    except BaseException:
        Stack(memory, stored, layout, events, runtime).close()
        raise
    return Stack(memory, stored, layout, events, runtime)


def _opened(
    choice: TierChoice, spec: KVSpec, places: dict[tuple[str, str], TierChoice], pool: Pool
) -> StorageBackend:  # fmt: skip
    """Open the backend of a tier. places: the stores of the tiers opened so far; this one is added."""
    assert choice.backend is not None
    backend: StorageBackend = choice.backend.make(spec)
    patience = getattr(choice.backend.config, "timeout", None)
    if isinstance(patience, int | float) and patience > choice.deadline:
        text = "tier=%s timeout: %g s is more than the tier's deadline of %g s: calls outlive it; lower it"
        log.warning(text, choice.name, patience, choice.deadline)
    try:
        with choice.backend.blamed():
            if pool.capacity:
                backend.register(pool.pages.view)
            identity = backend.identity()
            if choice.write != "never":
                backend.check_writable()
        if identity is not None:
            other = places.setdefault((backend.type, identity), choice)
            if other is not choice:
                raise ConfigError(choice.path, same_store(choice, other))
    except BaseException:
        backend.close()
        raise
    return backend


def asked_only(choices: Sequence[TierChoice]) -> tuple[TierChoice, ...]:
    """The tiers that other processes share, read-only and without bounds. Raises ConfigError if there is none."""
    shared = [choice for choice in choices if choice.backend is not None and choice.backend.cls.shared]
    if not shared:
        raise ConfigError("tiers", "an index needs a tier that processes share; add one, for example disk")
    return tuple(replace(choice, write="never", policy="lru", capacity=None, quota=None) for choice in shared)


def _refuse(problems: Sequence[tuple[str, str]]) -> None:
    """Raise one ConfigError for all problems, each a path and a text."""
    if problems:
        raise ConfigError.of_all(problems)


def _too_small(choice: TierChoice, chunk_bytes: int) -> Iterator[tuple[str, str]]:
    # A stored chunk may be compressed: only an uncompressed one is known not to fit.
    if choice.serializer is None or choice.serializer.type == "raw":
        least = pages_of(chunk_bytes if choice.serializer is None else envelope.ALIGN_BYTES + chunk_bytes)
        text = f"is less than one chunk takes ({least} bytes); raise it or lower chunk_tokens"
        if choice.capacity is not None and choice.capacity < least:
            yield f"{choice.path}.capacity", f"{choice.capacity} bytes {text}"
        for salt, size in (choice.quota or {}).items():
            if size < least:
                yield f"{choice.path}.quota", f"{size} bytes for {salt!r} {text}"


def _policy(choice: TierChoice, *, exact_only: bool) -> Policy:
    assert choice.backend is not None
    if choice.backend.cls.bounded and (choice.capacity or choice.quota):
        which = "capacity" if choice.capacity else "quota"
        text = f"{choice.backend.type!r} evicts by itself, by its own limit; set that one and remove this"
        raise ConfigError(f"{choice.path}.{which}", text)
    return Policy(
        capacity=choice.capacity, deadline=choice.deadline, write=choice.write, admission=choice.policy,
        ttl=choice.ttl, quota=_by_tag(choice.quota), exact_only=exact_only, protection=choice.protection,
        remember=choice.remember,
    )  # fmt: skip


def _by_tag(quota: Mapping[str, int] | None) -> dict[str, int] | None:
    """Quotas by salt tag instead of by salt."""
    return None if quota is None else {salt if salt == "*" else salt_tag(salt): size for salt, size in quota.items()}


def _serializers(
    choice: TierChoice, spec: KVSpec, format: MemoryFormat, raw: Any, runtime: Runtime, *, exact_only: bool
) -> list[Serializer]:
    assert choice.serializer is not None
    path = f"{choice.path}.serializer"
    serializer = in_time(path, partial(choice.serializer.make, spec), runtime)
    assert isinstance(serializer, Serializer)
    if format not in serializer.formats:
        takes = ", ".join(sorted(one.name for one in serializer.formats))
        raise ConfigError(path, f"{serializer.type!r} takes {takes}; the connector gives {format.name}: use raw")
    if exact_only and not serializer.lossless:
        raise ConfigError(path, f"{serializer.type!r} is lossy, and exact: true allows no lossy chunk: use raw")
    ours = TimedSerializer(serializer, runtime) if choice.timed else serializer
    return [ours] if serializer.type == "raw" else [ours, raw(raw.Config(), spec)]


def open_tier(block: str | Mapping[str, Any], spec: KVSpec, *, dst_device: str = "cpu") -> Tier:
    """Open a tier on its own, from the block that YAML would have for it: `{type: disk, path: /nvme/kv}`.

    Raises RuntimeError for an invalid dst_device, ConfigError for an invalid block.
    """
    runtime = SystemRuntime()
    settle_threads()
    make = partial(_open_tier, block, spec, dst_device, runtime)
    return runtime.uninterrupted(make, discard=Tier.close, leave=True)


def _open_tier(block: str | Mapping[str, Any], spec: KVSpec, dst_device: str, runtime: Runtime) -> Tier:
    try:
        torch.empty(0, device=dst_device)  # before anything is opened
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"dst_device: {dst_device!r} cannot be used here, use 'cpu': {reason}") from error
    registry = Registry.discover()
    resolved = resolve(EngineConfig.load({"tiers": [block]}), registry)
    layout = Layout(MemoryFormat.KV_BLOB, spec.torch_dtype, spec.blob_shape)
    events = EventBus((), runtime)
    stack = build_stack(
        resolved.tiers, spec, layout, layout.nbytes(spec.blob_shape(1)), registry=registry, events=events,
        runtime=runtime, dst_device=dst_device,
    )  # fmt: skip
    (tier,) = stack.tiers.values()
    if tier is not stack.memory:
        tier.closes_too(stack.memory.close)
    return tier
