"""Observers with a fault each, and odd ones."""

from __future__ import annotations

import logging
import queue
import random
import signal
import threading
import time
import warnings
from typing import ClassVar

from kvloom import Config, Event, KVSpec
from kvloom_testkit.mutants import Mutant, Oddity
from kvloom_testkit.reference.observer import CountingObserver


class FormatsTheReason(Mutant, CountingObserver):
    """Takes a reason for a word."""

    breaks = "O01"

    def on_event(self, event: Event) -> None:
        assert event.reason.isascii()
        super().on_event(event)


class TakesTheReasonForAFormat(Mutant, CountingObserver):
    """Uses it unescaped, in front of the numbers."""

    breaks = "O01"

    def on_event(self, event: Event) -> None:
        self.seen[(event.reason + " tier=%s") % event.tier] += 1


class FormatsWithBraces(Mutant, CountingObserver):
    """Fills in braces in the reason."""

    breaks = "O01"

    def on_event(self, event: Event) -> None:
        self.seen[(event.reason + " tier={tier}").format(tier=event.tier)] += 1


class DividesByTheSeconds(Mutant, CountingObserver):
    """The seconds may be zero."""

    breaks = "O01"

    def on_event(self, event: Event) -> None:
        if event.bytes:
            self.seen[f"{event.name} at {event.bytes / event.seconds:.0f} bytes a second"] += 1


class KnowsTheNames(Mutant, CountingObserver):
    """Has a table of the names there are today."""

    breaks = "O02"

    def on_event(self, event: Event) -> None:
        from kvloom_testkit.observers.conformance import NAMES

        self.seen[NAMES[NAMES.index(event.name)]] += 1


class SendsEachEvent(Mutant, CountingObserver):
    """Waits for a network, once an event."""

    breaks = "O03"

    def on_event(self, event: Event) -> None:
        time.sleep(0.02)


class BelongsToItsThread(Mutant, CountingObserver):
    """Like a connection of sqlite3."""

    breaks = "O04"

    def __init__(self, config: Config, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._owner = threading.get_ident()

    def on_event(self, event: Event) -> None:
        if threading.get_ident() != self._owner:
            raise RuntimeError("used on a thread that did not make it")


class RegistersItsMetrics(Mutant, CountingObserver):
    """In a registry of the whole process, under a fixed name."""

    breaks = "O05"
    registered: ClassVar[set[str]] = set()

    def __init__(self, config: Config, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        if "kvloom_events" in self.registered:
            raise ValueError("Duplicated timeseries in CollectorRegistry")
        self.registered.add("kvloom_events")

    def close(self) -> None:
        self.registered.clear()


class ClosesOnce(Mutant, CountingObserver):
    """Raises at the second `close`."""

    breaks = "O06"

    def close(self) -> None:
        del self.seen


class LeavesItsThread(Mutant, CountingObserver):
    """Exports in the background, for ever."""

    breaks = "O07"

    def __init__(self, config: Config, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._events: queue.Queue[Event] = queue.Queue()
        threading.Thread(target=self._export, daemon=True).start()

    def on_event(self, event: Event) -> None:
        self._events.put(event)

    def _export(self) -> None:
        while True:
            self.seen[self._events.get().name] += 1


class ConfiguresLogging(Mutant, CountingObserver):
    """For the whole process."""

    breaks = "O08"

    def on_event(self, event: Event) -> None:
        logging.getLogger("kvloom").setLevel(logging.CRITICAL)


class DisablesLogging(Mutant, CountingObserver):
    """Disables logging when it is closed."""

    breaks = "O08"

    def close(self) -> None:
        logging.disable(logging.CRITICAL)


class SilencesWarnings(Mutant, CountingObserver):
    """Silences the whole process's warnings."""

    breaks = "O08"

    def __init__(self, config: Config, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        warnings.simplefilter("ignore")


class ExportsAtSigterm(Mutant, CountingObserver):
    """Replaces the server's own handler."""

    breaks = "O08"

    def __init__(self, config: Config, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        signal.signal(signal.SIGTERM, lambda number, frame: self.close())


class SamplesEvents(Mutant, CountingObserver):
    """By seeded random numbers, the same ones every time."""

    breaks = "O08"

    def on_event(self, event: Event) -> None:
        random.seed(event.name)
        if random.random() < 0.5:
            super().on_event(event)


class ExportsInTheBackground(Oddity, CountingObserver):
    """And stops when it is closed."""

    def __init__(self, config: Config, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._thread = threading.Thread(target=self._export)
        self._thread.start()

    def on_event(self, event: Event) -> None:
        self._events.put(event)

    def close(self) -> None:
        self._events.put(None)
        self._thread.join()

    def _export(self) -> None:
        while (event := self._events.get()) is not None:
            self.seen[event.name] += 1


class TakesNoNotice(Oddity, CountingObserver):
    """Not every observer has something to say."""

    def on_event(self, event: Event) -> None:
        pass
