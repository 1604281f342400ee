"""The engine: lookup, store, retrieve and prefetch over find, load and save.

store     tokens -> segments -> connector.read -> Chunk -> Serializer.encode -> envelope -> tier
retrieve  tokens -> segments -> tier -> envelope -> Serializer.decode -> Chunk -> connector.write
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, overload

import torch

from kvloom import keys as keying
from kvloom.config import EngineConfig, resolve
from kvloom.contracts.connector import GPUConnector
from kvloom.engine.assembly import Components, Source, kept, open_components
from kvloom.engine.background import Background
from kvloom.engine.blending import Blending
from kvloom.engine.layers import LayerVerbs
from kvloom.engine.lookup import Index
from kvloom.engine.named import NamedEngines
from kvloom.errors import BackendError
from kvloom.interrupts import shielded_waiting
from kvloom.memory.pages import settle_threads
from kvloom.pipeline.task import Cancellation, Foreground, Task
from kvloom.pipeline.transfer import Transfer, check_where
from kvloom.plugins.registry import Registry
from kvloom.runtime import Runtime, SystemRuntime, close_all
from kvloom.telemetry.events import Callers
from kvloom.tiers.memory.index import Changes
from kvloom.tiers.memory.tier import MemoryTier
from kvloom.types import KVSpec, Segment, canonical_json, tokens_of

T = TypeVar("T")


_named: NamedEngines[Engine] = NamedEngines()


class Engine(LayerVerbs):
    """A KV cache for one model. Open it, use it from any number of threads, close it.

    tokens: 1-D integer CPU tensor, one sequence. mask: 1-D bool CPU tensor of the same length, like FFFFTTTT, its
    Falses a whole number of chunks or a hit (else ValueError); None selects everything. salt: keeps tenants apart;
    default is the config's. where: what the connector asks for.

    Every method raises BackendError once it is closed, and in a child of the process that opened it.
    """

    def __init__(self, parts: Components, *, owner: Engine | None = None) -> None:
        """Use `Engine.open`."""
        self.blending = parts.blending
        """The components of the configuration's `blend` block; None without one."""
        if parts.blending is not None:
            parts.blending.retriever.engine = self
            parts.blending.emit = parts.events.emit
        super().__init__(parts)
        self._parts = parts
        self._owner = owner
        self._background = Background(self, parts.events, parts.runtime)
        self._foreground = Foreground(parts.runtime)
        self._siblings: list[weakref.ref[Engine]] = []
        identity = keying.identity(self.spec, self.connector.format, self.connector.representation)
        record = canonical_json({"identity": identity, "spec": json.loads(self.spec.to_json())}).encode()
        for tier in self._stack.stored:
            tier.put_record(f"spec/{self.fingerprint}.json", record)

    # -- opening and closing -------------------------------------------------------------------------------------------

    @overload
    @classmethod
    def open(
        cls, config: Source, spec: KVSpec, *, role: Literal["engine"] = "engine", registry: Registry | None = None,
        runtime: Runtime | None = None,
    ) -> Engine: ...  # fmt: skip
    @overload
    @classmethod
    def open(
        cls, config: Source, spec: KVSpec, *, role: Literal["index"], registry: Registry | None = None,
        runtime: Runtime | None = None,
    ) -> Index: ...  # fmt: skip
    @classmethod
    def open(
        cls, config: Source, spec: KVSpec, *, role: str = "engine", registry: Registry | None = None,
        runtime: Runtime | None = None,
    ) -> Index:  # fmt: skip
        """An engine for KV that looks like `spec`. config: a YAML file, a mapping, or an EngineConfig.

        role: `engine`; or `index`, for a scheduler's process, which only asks what the shared tiers hold, for all
        ranks of `spec.world_size`. Raises ConfigError (with the YAML path and what to do) or PluginError, so that a
        configuration that cannot work is refused here and not while serving, and ValueError for another role.
        """
        runtime = runtime or SystemRuntime()
        settle_threads()  # here: the caller's own work would wait as well

        def opened() -> Index:
            with ExitStack() as made:
                parts = open_components(config, spec, made, role=role, registry=registry, runtime=runtime)
                index = cls(parts) if role == "engine" else Index(parts)
                made.pop_all()
            return index._attach_observers()

        return runtime.uninterrupted(opened, discard=lambda index: index.close(), leave=True)

    def sibling(self, spec: KVSpec, config: EngineConfig | None = None) -> Engine:
        """An engine for other KV over the same tiers: other adapters, or other layers, of the same model.

        config: for KV of another shape, the engine's configuration with other settings of its connector; its tiers are
        not opened. It is closed with this one, if not before. Raises ValueError if its KV has another dtype, or
        another shape without `config`.
        """
        if spec.dtype != self.spec.dtype or (config is None and spec.blob_shape(1) != self.spec.blob_shape(1)):
            raise ValueError("spec: a sibling must have the engine's KV shape and dtype")
        make = partial(self._sibling, spec, config or self.config)
        return self._runtime.uninterrupted(make, discard=Engine.close, leave=True)

    def _sibling(self, spec: KVSpec, config: EngineConfig) -> Engine:
        self._check_open()
        resolved = resolve(config, self._parts.registry)
        with ExitStack() as made:
            others = replace(
                self._parts, config=config, spec=spec, connector=kept(made, resolved.connector.make(spec)),
                tokens=kept(made, resolved.tokens.make(spec)),
                blending=kept(made, Blending.make(resolved.blend, spec)) if resolved.blend else None,
            )  # fmt: skip
            sibling = Engine(others, owner=self)
            made.pop_all()
        self._siblings = [*(ref for ref in self._siblings if ref() is not None), weakref.ref(sibling)]
        return sibling

    def after_fork_in_child(self, pid: int) -> None:
        super().after_fork_in_child(pid)
        self._background.after_fork_in_child(BackendError(self._gone))

    @shielded_waiting
    def close(self) -> None:
        """Let calls under way end and write all accepted KV, within the tiers' deadlines, and release everything.

        Idempotent. Calls that begin later raise BackendError.
        """
        if self._closed:
            return
        self._closed = True
        self._not_at_exit()
        siblings = [sibling for ref in self._siblings if (sibling := ref()) is not None]
        close_all(
            *(sibling.close for sibling in siblings),
            *(handle.close for handle in tuple(self._by_layer)),
            partial(self._foreground.close, self._stack.deadline),
            partial(self._background.close, self._stack.deadline, BackendError("the engine was closed")),
            *(() if self.blending is None else (self.blending.close,)),
            self.connector.close,
            self._tokens.close,
            *((self._stack.close, self._events.close) if self._owner is None else ()),
        )

    @classmethod
    def get_or_create(cls, instance_id: str, config: Source, spec: KVSpec) -> Engine:
        """The engine of that name in this process, opened if there is none.

        Raises ConfigError, and ValueError if there is one with another configuration or spec.
        """
        config = EngineConfig.load(config)
        find = partial(_named.get_or_open, instance_id, partial(cls.open, config, spec))
        engine = SystemRuntime().uninterrupted(find, leave=True)
        if engine.config != config:
            raise ValueError(f"instance_id: {instance_id!r} exists with another configuration; destroy it first")
        if engine.spec != spec:
            raise ValueError(f"instance_id: {instance_id!r} exists with another spec; destroy it first")
        return engine

    @classmethod
    def get(cls, instance_id: str) -> Engine | None:
        """The engine that `get_or_create` made under that name, if there is one."""
        return _named.get(instance_id)

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close and forget the engine of that name. It is fine if there is none."""
        SystemRuntime().uninterrupted(partial(_named.close, instance_id), leave=True)

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def retrieve(
        self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str | None = None, **where: Any
    ) -> torch.Tensor:
        """Write the KV of as many leading selected tokens as the tiers hold into the engine's KV.

        Returns a bool CPU mask `[tokens]`: True for the tokens whose KV is in place. It is False from the first chunk
        that no tier delivered, verified and in time.
        """
        return self._at_once(self._retrieve, tokens, mask, salt, where)

    def _retrieve(
        self, stop: Cancellation, callers: Callers, tokens: torch.Tensor, mask: torch.Tensor | None, salt: str | None,
        where: Mapping[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        whole, first = self._selected(tokens, mask, salt)
        keys = [segment.key for segment in whole]
        # Before, so that the request does not evict its own chunks; after, so that new chunks get their places too.
        self._stack.touch(keys)
        record = self._record("retrieve", whole, first, tokens, callers=callers)
        pieces = self._pieces(tokens, salt)
        moved = self._transfer.load_leading(stop, whole[first:], where, keys=keys, pieces=pieces, record=record)
        if moved != whole[first:]:
            asked = set(whole)
            keys = [*keys, *(segment.key for segment in moved if segment not in asked)]
        self._stack.touch(keys, count=False)
        retrieved = torch.zeros(tokens.numel(), dtype=torch.bool)
        if moved:
            retrieved[moved[0].start : moved[-1].end] = True
        return retrieved

    def store(
        self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str | None = None, **where: Any
    ) -> int:
        """Store the KV of the selected tokens. Only missing chunks are copied; stored ones cost a lookup.

        If the mask begins within a chunk, the whole chunk is stored, so all of its KV must be in place.

        Returns the number of copied tokens, once the caller's KV may be overwritten. Tiers below memory are written in
        the background.
        """
        return self._at_once(self._store, tokens, mask, salt, where)

    def _store(
        self, stop: Cancellation, callers: Callers, tokens: torch.Tensor, mask: torch.Tensor | None, salt: str | None,
        where: Mapping[str, Any],
    ) -> int:  # fmt: skip
        whole, first = self._selected(tokens, mask, salt, inside=True)
        keys = [segment.key for segment in whole]
        self._stack.touch(keys, count=False)  # before, so that the store does not evict its own chunks
        record = self._record("store", whole, first, tokens, callers=callers)
        copied = self._transfer.save(stop, whole[first:], where, keys=keys, record=record)
        self._stack.touch(keys)
        self._tokens.learn(tokens, salt=self._salt(salt))
        return tokens_of(segment for segment, new in zip(whole[first:], copied, strict=True) if new)

    def prefetch(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str | None = None) -> Task:
        """Bring chunks from the lower tiers into memory, in the background.

        Leased and pinned chunks are not evicted for them. While 1,024 tasks wait, another one ends at once, moves
        nothing and counts as dropped.
        """
        callers = self._callers()

        def begun() -> Task:
            whole, first = self._selected(tokens, mask, salt)
            keys = [segment.key for segment in whole]
            self._stack.touch(keys)
            record = self._record("prefetch", whole, first, tokens, callers=callers)
            pieces, load = self._pieces(tokens, salt), self._transfer.load
            work = partial(load, segments=whole[first:], where=None, keys=keys, pieces=pieces, record=record)
            self._check_open()
            return self._background.start(whole[first:], work, record, ahead=True)

        return self._runtime.uninterrupted(begun, discard=Task.cancel, leave=True)

    def pin(self, tokens: torch.Tensor, *, salt: str | None = None) -> int:
        """Bring the chunks of `tokens` into memory and keep them there. Returns the number of pinned tokens."""
        return self._at_once(self._pin, tokens, salt)

    def _pin(self, stop: Cancellation, callers: Callers, tokens: torch.Tensor, salt: str | None) -> int:
        segments = self._named(tokens, salt)
        keys = [segment.key for segment in segments]
        record = self._record("pin", segments, 0, tokens, callers=callers)
        self._transfer.load(stop, segments, None, keys=keys, record=record)
        pinned = [segment for segment in segments if self._stack.memory.pin([segment.key], True)]
        return tokens_of(pinned)

    @shielded_waiting
    def unpin(self, tokens: torch.Tensor, *, salt: str | None = None) -> None:
        """Let the chunks of `tokens` be evicted again."""
        self._stack.memory.pin([segment.key for segment in self.segments(tokens, salt=salt)], False)

    @shielded_waiting
    def remove(self, tokens: torch.Tensor, *, salt: str | None = None) -> None:
        """Delete the chunks of `tokens`, and pieces that shorter sequences left of them, everywhere, even if pinned.

        They are gone on return, and reads and writes under way do not bring them back. Raises BackendError if a tier
        cannot confirm it, after all tiers were asked.
        """
        self._check_open()
        possible = self._tokens.possible(tokens, salt=self._salt(salt))
        self._stack.remove([segment.key for segment in possible])

    @shielded_waiting
    def clear(self, salt: str | None = None) -> None:
        """Delete all KV of this model that was stored under `salt`; with None, under any. Raises as `remove` does."""
        self._check_open()
        self._stack.clear(f"{self.fingerprint}/" + ("" if salt is None else f"{keying.salt_tag(salt)}/"))

    @property
    def memory(self) -> MemoryTier | None:
        """The memory tier, if the configuration has one, whatever it is called there."""
        self._check_open()
        return self._stack.memory if self._stack.memory.keep else None

    @shielded_waiting
    def changes(self) -> Changes:
        """Chunks that entered or left memory since the last call, for a single mirror in another process."""
        self._check_open()
        return self._stack.memory.changes()

    @shielded_waiting
    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every accepted write is in its tier, or has failed; False if `timeout` seconds were not enough."""
        self._check_here()
        return self._stack.flush(math.inf if timeout is None else self._runtime.now() + timeout)

    # -- the primitives ------------------------------------------------------------------------------------------------

    @shielded_waiting
    def touch(self, segments: Sequence[Segment]) -> None:
        """Mark a chain as recently used in every tier, such as a hit of the engine's own prefix cache."""
        self._check_open()
        self._stack.touch([segment.key for segment in segments])

    def load(
        self, segments: Sequence[Segment], *, into: GPUConnector | None = None, at_once: bool = False, **where: Any
    ) -> Task:
        """Write the KV of each segment that a tier delivers into the engine's KV, in the background. Others stay gaps.

        into: takes the KV instead of the engine's connector, in chunks of the same format and shape. at_once: give the
        connector all that is at hand by one call, which `cancel` then waits for, and not in pieces of 256 MiB.
        """
        callers = self._callers()

        def begun() -> Task:
            connector = into or self.connector
            check_where(connector, segments, where)
            keys = [segment.key for segment in segments]
            record = self._record("load", segments, callers=callers)
            work = partial(
                self._transfer.load, segments=segments, where=connector.ordered(where), keys=keys, into=connector,
                record=record, at_once=at_once,
            )  # fmt: skip
            self._check_open()
            return self._background.start(segments, work, record, awaited=True)

        return self._runtime.uninterrupted(begun, discard=Task.cancel)

    def save(self, segments: Sequence[Segment], **where: Any) -> Task:
        """Store the KV of segments in the background. The task is done when the caller's KV may be overwritten.

        The task's mask is of the segments that were copied: False where the tiers had the KV, or had no room.
        """
        callers = self._callers()

        def begun() -> Task:
            check_where(self.connector, segments, where)
            keys = [segment.key for segment in segments]
            record = self._record("save", segments, callers=callers)
            ordered = self.connector.ordered(where)
            work = partial(self._transfer.save, segments=segments, where=ordered, keys=keys, record=record)
            self._check_open()
            return self._background.start(segments, work, record)

        return self._runtime.uninterrupted(begun, discard=Task.cancel)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _at_once(self, verb: Callable[..., T], *given: Any) -> T:
        """Run a verb whose copies stop when the caller is interrupted."""
        stop = Cancellation(self._runtime)
        run = partial(self._foreground.run, stop, partial(verb, stop, self._callers(), *given))
        return self._runtime.uninterrupted(run, cancel=stop.cancel)

    @property
    def _transfer(self) -> Transfer:
        """A transfer over the current connector."""
        return Transfer(self._stack, self.connector, self._events, self._runtime)
