"""Events: every one is counted, observers hear them in order, and no observer can hold anybody up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom import Event, Observer
from kvloom.builtin.log import LogConfig, LogObserver
from kvloom.runtime import SystemRuntime
from kvloom.telemetry.events import QUEUE_EVENTS, CounterKey, EventBus, Totals

SOON = 30.0


class Recorder(Observer):
    """Remembers; stops at the gate while it is closed."""

    type = "recorder"

    def __init__(self, *, fails: type[BaseException] | None = None) -> None:
        super().__init__(self.Config())
        self.heard: list[Event] = []
        self.fails = fails
        self.arrived = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.closed = 0

    def on_event(self, event: Event) -> None:
        self.arrived.set()
        self.gate.wait(SOON)
        self.heard.append(event)
        if self.fails:
            raise self.fails("no memory for this")

    def close(self) -> None:
        self.closed += 1
        if self.fails:
            raise self.fails("no memory for this")


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.gate.set()


def bus_of(*observers: Observer) -> EventBus:
    return EventBus(observers, SystemRuntime())


events = st.builds(
    Event,
    name=st.sampled_from(["stored", "missed"]),
    tier=st.sampled_from(["", "disk"]),
    reason=st.sampled_from(["", "gone"]),
    chunks=st.integers(0, 9),
    tokens=st.integers(0, 2**40),
    bytes=st.integers(0, 2**50),
    seconds=st.floats(0, 10),
)


@given(st.lists(events, max_size=20))
def test_counters_are_the_sums_by_name_tier_and_reason(emitted: list[Event]) -> None:
    bus = bus_of()
    for event in emitted:
        bus.emit(event)
    expected: dict[Any, Totals] = {}
    for event in emitted:
        key = (event.name, event.tier, event.reason)
        old = expected.get(key, Totals(0, 0, 0, 0, 0.0))
        expected[key] = Totals(
            old.count + 1,
            old.chunks + event.chunks,
            old.tokens + event.tokens,
            old.bytes + event.bytes,
            old.seconds + event.seconds,
        )
    assert bus.counters() == expected


def test_counters_are_a_copy() -> None:
    bus = bus_of()
    before = bus.counters()
    bus.emit(Event("stored", "disk"))
    assert before == {}
    assert bus.counters()[CounterKey("stored", "disk", "")].count == 1


def test_without_observers_nothing_runs_in_the_background() -> None:
    before = threading.active_count()
    bus = bus_of()
    bus.emit(Event("stored"))
    assert threading.active_count() == before
    assert bus.flush(0.0)
    bus.close()


def test_every_observer_hears_every_event_in_order() -> None:
    first, second = Recorder(), Recorder()
    bus = bus_of(first, second)
    emitted = [Event("stored", tokens=index) for index in range(100)]
    for event in emitted:
        bus.emit(event)
    assert bus.flush(SOON)
    assert first.heard == second.heard == emitted
    bus.close()


def test_flush_waits_for_the_event_that_is_being_told(recorder: Recorder) -> None:
    bus = bus_of(recorder)
    recorder.gate.clear()
    bus.emit(Event("stored"))
    assert recorder.arrived.wait(SOON)
    assert not bus.flush(0.01)
    recorder.gate.set()
    assert bus.flush(SOON)
    assert len(recorder.heard) == 1
    bus.close()


def test_a_slow_observer_loses_the_oldest_and_holds_nobody_up(recorder: Recorder) -> None:
    bus = bus_of(recorder)
    recorder.gate.clear()
    bus.emit(Event("stored", tokens=-1))
    assert recorder.arrived.wait(SOON)
    for index in range(QUEUE_EVENTS + 10):
        bus.emit(Event("stored", tokens=index))
    assert bus.counters()[CounterKey("observer_lost", "", "queue full")].count == 10
    recorder.gate.set()
    assert bus.flush(SOON)
    assert [event.tokens for event in recorder.heard] == [-1, *range(10, QUEUE_EVENTS + 10)]
    assert bus.counters()[CounterKey("stored", "", "")].count == QUEUE_EVENTS + 11
    bus.close()


@pytest.mark.parametrize("fails", [ValueError, SystemExit, BaseException])
def test_a_raising_observer_is_logged_once_counted_and_does_not_disturb_the_next(
    caplog: pytest.LogCaptureFixture, fails: type[BaseException]
) -> None:
    bad, good = Recorder(fails=fails), Recorder()
    bus = bus_of(bad, good)
    with caplog.at_level(logging.WARNING, "kvloom"):
        for _ in range(3):
            bus.emit(Event("stored"))
        assert bus.flush(SOON)
    assert len(good.heard) == 3
    assert bus.counters()[CounterKey("observer_error", "", "recorder")].count == 3
    assert [record.getMessage() for record in caplog.records] == [
        "observer recorder failed; further failures are only counted"
    ]
    bus.close()
    assert bad.closed == good.closed == 1


def test_close_tells_what_is_queued_then_closes_the_observers_once() -> None:
    recorder = Recorder()
    bus = bus_of(recorder)
    for _ in range(50):
        bus.emit(Event("stored"))
    bus.close()
    bus.close()
    assert (len(recorder.heard), recorder.closed) == (50, 1)
    bus.emit(Event("stored"))
    assert bus.counters()[CounterKey("stored", "", "")].count == 51
    assert len(recorder.heard) == 50, "nothing is called on an observer after its close"
    assert bus.flush(0.0), "nothing waits for a thread that is gone"


def test_close_leaves_a_stuck_observer_alone(recorder: Recorder) -> None:
    bus = bus_of(recorder)
    recorder.gate.clear()
    bus.emit(Event("stored"))
    assert recorder.arrived.wait(SOON)
    bus.close(timeout=0.01)
    assert recorder.closed == 0


def test_the_log_observer_writes_facts_and_marks_trouble(caplog: pytest.LogCaptureFixture) -> None:
    observer = LogObserver(LogConfig(level="debug"))
    with caplog.at_level(logging.DEBUG, "kvloom.events"):
        observer.on_event(Event("stored", "disk", tokens=256, chunks=1, bytes=4096, seconds=0.5))
        observer.on_event(Event("corrupt", "disk", reason="checksum"))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", "stored tier=disk chunks=1 tokens=256 bytes=4096 seconds=0.500000"),
        ("WARNING", "corrupt tier=disk reason=checksum"),
    ]


def test_reasons_are_few_and_short_whatever_is_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.telemetry.events.MOST_COUNTERS", 10)
    bus = bus_of()
    for number in range(50):
        bus.emit(Event("missed", "disk", reason=f"text {number}", chunks=1))
        bus.emit(Event("corrupt", "disk", reason="x" * 1_000_000, chunks=1))
    counters = bus.counters()
    assert len(counters) <= 12 and max(len(key.reason) for key in counters) < 80
    assert sum(totals.chunks for totals in counters.values()) == 100, "nothing goes uncounted"
    assert counters[CounterKey("corrupt", "disk", "other")].count == 50
