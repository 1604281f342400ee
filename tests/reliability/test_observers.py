"""Observers that raise, are slow, or never return: serving does not notice, memory is bounded, and it is counted."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Callable, Iterator

import odd_observers
import pytest
from odd_observers import heard
from reliability_support import (
    GENEROUS_SECONDS,
    events,
    eventually,
    kv_of,
    open_engine,
    plugins_with,
    retrieved,
    tokens_of,
)

from kvloom import Engine
from kvloom.telemetry.events import QUEUE_EVENTS

TOKENS, KV = tokens_of(64, 1), kv_of(64, 1)
ABSENT = tokens_of(4 * 256, 2)


@pytest.fixture(autouse=True)
def fresh(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.ERROR, "kvloom")
    heard.clear()
    odd_observers.release.clear()
    yield
    odd_observers.release.set()
    tracemalloc.stop()


def emitted(engine: Engine) -> int:
    return sum(totals.count for key, totals in engine.counters().items() if not key.name.startswith("observer_"))


def serve(engine: Engine, count: int) -> None:
    """Until `count` more events were emitted: what is there is right, and what is not is an event for each chunk."""
    nowhere, room = engine.segments(ABSENT), kv_of(len(ABSENT), 2)
    until = emitted(engine) + count
    while emitted(engine) < until:
        assert retrieved(engine, TOKENS, KV) == len(TOKENS)
        assert not engine.load(nowhere, kv=room).result(GENEROUS_SECONDS).any()


@pytest.mark.parametrize("observer", ["raising", "slow", "stuck"])
def test_an_odd_observer_disturbs_nobody(observer: str, tally: Callable[..., None]) -> None:
    with open_engine(
        {"type": "memory", "capacity": "1MiB"}, registry=plugins_with("odd_observers"), observers=[observer]
    ) as engine:
        engine.store(TOKENS, kv=KV)
        assert engine.flush()
        serve(engine, QUEUE_EVENTS + 100)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        serve(engine, 2 * QUEUE_EVENTS)
        after = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        lost = events(engine, "observer_lost")
        if observer == "raising":
            eventually(lambda: heard["raising"] + events(engine, "observer_lost") == emitted(engine), "the last event")
            assert events(engine, "observer_error") == heard["raising"], "it is told on, and each time is counted"
        else:
            assert lost >= emitted(engine) - QUEUE_EVENTS - heard[observer] - 1, (
                "every event that was not kept is counted"
            )
            assert lost > QUEUE_EVENTS
        assert after - before < QUEUE_EVENTS * 512, "what waits for an observer is bounded"
        tally(events=emitted(engine), **{f"lost_to_the_{observer}_one": lost})
        odd_observers.release.set()
