"""kvloom observer `events_zmq`: KV events over ZeroMQ in vLLM's format, for routers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvloom import hookimpl

if TYPE_CHECKING:
    from kvloom import Observer


@hookimpl
def kvloom_observers() -> Iterable[type[Observer]]:
    from kvloom_events_zmq.observer import ZmqEventsObserver

    return [ZmqEventsObserver]
