"""The ordered stack of tiers, fast to slow: where chunks are, and what is done to all tiers at once.

`loader` brings chunks up to the engine, `storer` takes them from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from kvloom.contracts.observer import ChunkEvent
from kvloom.errors import BackendError
from kvloom.pipeline.load import Loader
from kvloom.pipeline.store import Storer
from kvloom.runtime import Runtime, close_all
from kvloom.telemetry.events import EventBus
from kvloom.telemetry.request_trace import NO_TRACE, RequestTrace
from kvloom.tiers.chain import NO_CHAIN, Chain
from kvloom.tiers.memory.tier import MemoryTier
from kvloom.tiers.request_context import HURRIED_SHARE, RequestContext
from kvloom.tiers.stored.tier import StoredTier
from kvloom.tiers.tier import Layout, Tier
from kvloom.types import ChunkKey, Health


class Stack:
    """All tiers of an engine. `memory` is always there; without a memory tier in the config it keeps nothing."""

    def __init__(
        self, memory: MemoryTier, stored: Sequence[StoredTier], layout: Layout, events: EventBus, runtime: Runtime
    ) -> None:
        self.memory = memory
        self.stored = tuple(stored)
        kept: list[Tier] = [memory] if memory.keep else []
        self.tiers = {tier.name: tier for tier in [*kept, *stored]}
        """The tiers of the config by name, in its order."""
        self.layout = layout
        self._events = events
        self._runtime = runtime
        self.loader = Loader(memory, stored, layout, events, runtime)
        self.storer = Storer(memory, stored, layout, events, runtime, deadline=self.deadline)

    def context(
        self, chain: Chain = NO_CHAIN, record: RequestTrace = NO_TRACE, *, seconds: float = math.inf
    ) -> RequestContext:
        """The context of an operation that begins now. chain: its chunks. record: its trace. seconds: its deadline, if
        that is less than the tiers'.
        """
        since, seconds = self.memory.invalidations.mark(), min(self.deadline, seconds)
        return RequestContext(self._runtime, seconds, since=since, chain=chain, record=record)

    @property
    def deadline(self) -> float:
        """The longest that one step of any tier may take, in seconds."""
        return max((tier.deadline for tier in self.stored), default=self.memory.deadline)

    @property
    def passes_through(self) -> bool:
        """Chunks that are loaded are for the engine alone: neither memory nor a faster tier keeps them."""
        return not self.memory.keep and len(self.stored) == 1

    # -- finding -------------------------------------------------------------------------------------------------------

    def all_in_memory(self, keys: Sequence[ChunkKey], names: Sequence[str] | None = None) -> bool:
        """Return whether memory is among `names` and holds every key. Takes no lock and changes nothing."""
        memory = self.memory
        return memory.keep and (names is None or memory.name in names) and memory.has_all(keys)

    def locate(
        self, keys: Sequence[ChunkKey], names: Sequence[str] | None = None, context: RequestContext | None = None
    ) -> list[str | None]:
        """The fastest of the tiers `names` (default: all) that says it holds each key.

        Once a faster tier has the first key, a tier gets `HURRIED_SHARE` of its deadline to answer about the rest.
        """
        context = context or self.context()
        where: list[str | None] = [None] * len(keys)
        left = list(range(len(keys)))
        for name, tier in self.tiers.items():
            if not left:
                break
            if names is None or name in names:
                wanted = keys if len(left) == len(keys) else [keys[index] for index in left]
                found = tier.find_within(wanted, context, 1.0 if where[0] is None else HURRIED_SHARE)
                if len(left) == len(keys) and all(found):
                    return [name] * len(keys)
                for index, here in zip(left, found, strict=True):
                    if here:
                        where[index] = name
                left = [index for index, here in zip(left, found, strict=True) if not here]
        return where

    def touch(self, chain: Sequence[ChunkKey], *, count: bool = True) -> None:
        """Mark a whole chain as recently used in every tier. count: count it as one more use."""
        self.memory.touch(chain)
        for tier in self.stored:
            tier.touch(chain, count=count)

    # -- all tiers -----------------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        """Delete chunks everywhere. Every tier is asked; then raises a BackendError with what each said that failed."""
        with self.memory.invalidations.removing(keys):
            self.memory.remove(keys)
            _each(self.stored, lambda tier: tier.remove(keys))

    def clear(self, prefix: str) -> None:
        """Delete every chunk whose key starts with `prefix` everywhere; as `remove` does.

        prefix: a beginning of `<fingerprint>/<salt tag>/`, up to and with a slash.
        """

        with self.memory.invalidations.clearing(prefix):
            self.memory.remove([key for key in self.memory.chunks() if f"{key.namespace}/".startswith(prefix)])
            try:
                _each(self.stored, lambda tier: tier.clear(prefix))
            finally:
                self._events.emit_chunks(ChunkEvent("cleared", prefix=prefix))

    def flush(self, until: float) -> bool:
        """Wait until every accepted write is in its tier; False if `until` came first."""
        done = [tier.flush(until) for tier in self.stored]
        return all(done)

    def health(self) -> Health:
        """State of the tiers of the config."""
        return Health(tuple(tier.health() for tier in self.tiers.values()))

    def close(self) -> None:
        """Write what is to be written, within the deadlines, and give everything back."""
        write_back = partial(self.memory.write_back_all, self._runtime.now() + self.deadline)
        close_all(write_back, *(tier.close for tier in self.stored), self.memory.close)


def _each(tiers: Sequence[StoredTier], do: Callable[[StoredTier], None]) -> None:
    errors = []
    for tier in tiers:
        try:
            do(tier)
        except BackendError as error:
            errors.append(error)
    if errors:
        raise BackendError("; ".join(map(str, errors))) from errors[0]
