"""kvloom observer `events_zmq`: KV events over ZeroMQ in vLLM's format, for routers."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom import hookimpl


@hookimpl
def kvloom_observers() -> Mapping[str, str]:
    return {"events_zmq": "kvloom_events_zmq.observer:ZmqEventsObserver"}
