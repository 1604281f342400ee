"""Observer: what happens, as events."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

from kvloom.contracts.component import Component
from kvloom.types import ChunkKey, Health, KVSpec, Segment

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
    """The reason for `missed`, `dropped`, `evicted`, `tier_error`, `tier_paused` and `tier_resumed`: one of few words,
    never the text of an error, nor anything that a blob says."""


@dataclass(frozen=True, slots=True)
class ChunkEvent:
    """Chunks that entered or left a tier, for routers that send requests to where their KV is. A hint, not a ledger.

    Holds keys and tokens, so only observers with `sees_chunks` receive it.
    """

    name: Literal["named", "stored", "removed", "cleared"]
    """`named`: `segments` of a sequence are about to be stored or retrieved, and `tokens` are its tokens; pieces of its
    tail are not named. `cleared`: everything whose key starts with `prefix` went, from all tiers."""
    tier: str = ""
    in_memory: bool = False
    """The tier is this process's own memory."""
    keys: tuple[ChunkKey, ...] = ()
    """Keys of the chunks that were stored or removed."""
    segments: tuple[Segment, ...] = ()
    tokens: bytes = b""
    """int32-LE, the whole sequence up to the end of the last segment."""
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One tier's work for one request, all its chunks together."""

    name: str
    """`read`, `decode` (within `read`), `write`, `encode` (within `write`), or `copy`: the connector's, of no tier."""
    tier: str
    began: float
    """Start of its first chunk, in seconds since the epoch."""
    seconds: float
    """From when the first chunk's began to when the last one's ended."""
    busy_seconds: float
    """The chunks' own times: they overlap."""
    chunks: int
    bytes: int
    """Bytes of blobs, for `read` and `write`; of KV otherwise."""
    codec: str = ""
    """The serializer's type, for `decode` and `encode`."""


@dataclass(frozen=True, slots=True)
class Request:
    """A finished request, reported once it and its background writes are over.

    Holds keys, and no tokens. Only observers with `sees_requests` receive it.
    """

    verb: str
    """`retrieve`, `store`, `retrieve_layer`, `store_layer`, `load`, `load_layers`, `save`, `prefetch`, `pin`,
    `lookup`. One that is not known is to be passed over."""
    began: float
    """In seconds since the epoch."""
    seconds: float
    """Until the verb, or its task, ended; writes in the background may have ended later."""
    tokens: int
    """Number of tokens requested or offered."""
    served_tokens: int
    """Number of tokens delivered, or stored now."""
    keys: tuple[ChunkKey, ...]
    """The whole chain."""
    ends: tuple[int, ...]
    """End of each of its chunks, in tokens."""
    first: int
    """The first of them that was asked for."""
    num_tokens: int
    """Length of the whole sequence, including the tokens that did not fill a chunk."""
    chunk_tokens: int
    sources: Mapping[str, int]
    """The tiers that the delivered tokens came from, with the number of tokens."""
    steps: tuple[Step, ...]
    error: str = ""
    """The type of the raised error."""
    pieces: tuple[Segment, ...] = ()
    """Pieces that shorter sequences had left of the first chunk that was nowhere: those that were taken."""


class CounterKey(NamedTuple):
    """The key of a counter: an event's name, tier and reason.

    Two names are no events: `observer_error` (the reason is the observer's type) and `observer_lost`.
    """

    name: str
    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums over all events of one name, tier and reason."""

    count: int
    chunks: int
    tokens: int
    bytes: int
    seconds: float


class Watched(Protocol):
    """An engine, for those who watch it: from any thread, asking no store, until the observer is closed."""

    instance_id: str
    fingerprint: str
    spec: KVSpec

    def health(self) -> Health:
        """The state of its tiers; none once the engine is gone."""

    def counters(self) -> Mapping[CounterKey, Totals]:
        """The sums of its events by name, tier and reason; none once it is gone."""


class Observer(Component):
    """Receives events from a queue, on a separate thread, never on the hot path. Errors and delays are contained."""

    sees_chunks: ClassVar[bool] = False
    """It also receives chunk events. Only engines that move KV make them: an index does not."""
    sees_requests: ClassVar[bool] = False
    """It also receives requests."""

    def watch(self, engine: Watched) -> None:
        """Called once, when the engine is open, before any event. An error raised here keeps the
        engine from opening."""

    def caller(self) -> object:
        """On the caller's thread, as a request begins, if `sees_requests`: what to remember of where it comes from.

        A trace's context, for example. Fast: the caller waits.
        """
        return None

    def on_request(self, request: Request, caller: object) -> None:
        """Called as `on_event` is, if `sees_requests`. caller: what `caller` said as the request began."""

    @abstractmethod
    def on_event(self, event: Event) -> None:
        """Receive an event. Called on a thread of the engine, one event after the other; an error raised here is
        counted and does no harm."""

    def on_chunks(self, event: ChunkEvent) -> None:
        """Called as `on_event` is, if `sees_chunks`. A name that is not known is to be passed over."""
