"""Requirements of observers. See `ObserverConformance`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import get_args

from kvloom import Event, EventName, Observer
from kvloom_testkit.conformance import Conformance
from kvloom_testkit.process_state import left_as_it_is
from kvloom_testkit.running import together

NAMES: tuple[EventName, ...] = get_args(EventName)
Opened = Callable[[], Observer]


def events() -> list[Event]:
    """Events of each name: empty, with much, and with much that took no time."""
    return [
        event
        for name in NAMES
        for event in (
            Event(name),
            Event(name, "disk", 1 << 40, 1 << 30, 1 << 50, 12.5, "a reason, with =, 99 %, %s, {}, {0!r}, \n and ä"),
            Event(name, "memory", 256, 1, 1 << 20, 0.0),
        )
    ]


class ObserverConformance(Conformance):
    """Requirements of an `Observer`.

    `make` is a function that makes a new observer; several may exist at once.
    """

    kind = "observer"
    contract = Observer

    def test_O01_takes_every_event(self, opened: Opened) -> None:
        """`on_event` takes an event of every name, with any numbers and any text in it, and raises nothing.

        Why: an error is contained and counted, and the observer loses the event.

        Usually: a table lacks a name, bytes are divided by zero seconds, or a reason is used as a number, as a format,
        or as a label without escaping.
        """
        observer = opened()
        for event in events():
            observer.on_event(event)

    def test_O02_passes_over_names_it_does_not_know(self, opened: Opened) -> None:
        """An event with an unknown name raises nothing.

        Why: a later kvloom may have more events, which must not require a new release of the plugin.

        Usually: the name is looked up with `[]`, or a match has no last case.
        """
        opened().on_event(Event("something_new", "disk", 1, 1, 1, 1.0))  # type: ignore[arg-type]

    def test_O03_does_not_keep_the_queue_waiting(self, opened: Opened) -> None:
        """It handles two hundred events within a second.

        Why: all observers of an engine share a queue of 4,096 events; a slow one makes all of them lose events.

        Usually: each event is sent, or flushed to a disk, on its own.
        """
        observer, began = opened(), time.monotonic()
        for _ in range(200):
            observer.on_event(Event("retrieved", "memory", 256, 1, 1 << 20, 0.001))
            assert time.monotonic() - began < 1.0, "too slow"

    def test_O04_is_called_on_another_thread(self, opened: Opened) -> None:
        """It receives events on another thread than the one that made it.

        Why: events come from a queue, on a separate thread.

        Usually: a database connection, or an event loop, that belongs to the thread that made it.
        """
        observer = opened()
        together(lambda: [observer.on_event(event) for event in events()])

    def test_O05_two_live_side_by_side(self, opened: Opened) -> None:
        """Two observers of the type, with the same settings, can be made in one process, and both work.

        Why: a process may have several engines: two models, or two ranks.

        Usually: metrics are registered under fixed names, or a port is bound, each time one is made.
        """
        both = opened(), opened()
        for observer in both:
            for event in events():
                observer.on_event(event)

    def test_O06_closing_twice_is_fine(self, make: Opened) -> None:
        """`close` may be called twice, and on an observer that received nothing.

        Why: an engine that fails to open closes what it has made so far, and its owner closes it once more.

        Usually: the second call closes a resource that is None by then.
        """
        for told in (False, True):
            observer = make()
            if told:
                observer.on_event(Event("stored"))
            observer.close()
            observer.close()

    def test_O07_leaves_no_threads_behind(self, make: Opened) -> None:
        """After `close`, no thread of the observer is running.

        Why: engines are opened and closed again in notebooks, tests and reloading servers.

        Usually: an exporter's daemon thread is never stopped.
        """
        make().close()  # what a library starts once and keeps is not the observer's
        before = set(threading.enumerate())
        for _ in range(3):
            observer = make()
            observer.on_event(Event("stored"))
            observer.close()
        until = time.monotonic() + 2.0
        while (left := set(threading.enumerate()) - before) and time.monotonic() < until:
            time.sleep(0.01)
        assert not left

    def test_O08_leaves_the_process_as_it_is(self, make: Opened) -> None:
        """Making one, sending it events and closing it changes neither logging, signals, warnings and hooks of the
        interpreter, nor random numbers, nor the settings of torch.

        Why: it runs inside a server.

        Usually: `logging.basicConfig`, or a handler for a signal, in the constructor; or `close` stops more than its
        own threads.
        """
        with left_as_it_is():
            observer = make()
            for event in events():
                observer.on_event(event)
            observer.close()
