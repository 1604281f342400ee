"""Observer: what happens, as events."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from kvloom.contracts.component import Component

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


class Observer(Component):
    """Is told of events from a queue, on a thread of its own, never on the hot path. Raising or slow is contained."""

    @abstractmethod
    def on_event(self, event: Event) -> None: ...
