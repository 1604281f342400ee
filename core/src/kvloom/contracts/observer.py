"""Observer: what happens, as events."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvloom.contracts.component import Component
from kvloom.types import ChunkKey, Segment

EventName = Literal[
    "stored",
    "retrieved",
    "missed",
    "promoted",
    "evicted",
    "dropped",
    "corrupt",
    "tier_error",
    "tier_paused",
    "tier_resumed",
    "blended",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to KV. Never holds tokens or keys."""

    name: EventName
    tier: str = ""
    tokens: int = 0
    chunks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    """Why, for `missed`, `dropped`, `evicted`, `corrupt`, `tier_error`, `tier_paused` and `tier_resumed`."""


@dataclass(frozen=True, slots=True)
class ChunkEvent:
    """Which chunks came to a tier or left it, for those who route requests to where their KV is. A hint, not a ledger.

    Holds keys and tokens: only observers with `sees_chunks` are told.
    """

    name: Literal["named", "stored", "removed", "cleared"]
    """`named`: `segments` of a sequence are about to be stored or retrieved, and `tokens` are its tokens. `cleared`:
    everything whose key starts with `prefix` went, from all tiers."""
    tier: str = ""
    in_memory: bool = False
    """The tier is this process's own memory."""
    keys: tuple[ChunkKey, ...] = ()
    """What was stored or removed."""
    segments: tuple[Segment, ...] = ()
    tokens: bytes = b""
    """int32-LE, the whole sequence up to the end of the last segment."""
    prefix: str = ""


class Observer(Component):
    """Is told of events from a queue, on a thread of its own, never on the hot path. Raising or slow is contained."""

    sees_chunks: ClassVar[bool] = False
    """It is told of chunks, too. Only engines that move KV make it: an index does not."""

    @abstractmethod
    def on_event(self, event: Event) -> None: ...

    def on_chunks(self, event: ChunkEvent) -> None:
        """Called as `on_event` is, if `sees_chunks`. A name that is not known is to be passed over."""
