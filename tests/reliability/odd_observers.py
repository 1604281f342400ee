"""Observers as they should not be, as a plugin provides them."""

from __future__ import annotations

import threading
from collections import Counter

from kvloom import Event, Observer, hookimpl

heard: Counter[str] = Counter()
"""Events that each was told."""
release = threading.Event()
"""Lets those that dawdle go."""


class Raising(Observer):
    type = "raising"

    def on_event(self, event: Event) -> None:
        heard["raising"] += 1
        raise RuntimeError("not today")


class Slow(Observer):
    type = "slow"

    def on_event(self, event: Event) -> None:
        release.wait(0.005)
        heard["slow"] += 1


class Stuck(Observer):
    type = "stuck"

    def on_event(self, event: Event) -> None:
        release.wait()
        heard["stuck"] += 1


@hookimpl
def kvloom_observers() -> list[type[Observer]]:
    return [Raising, Slow, Stuck]
