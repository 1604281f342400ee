"""An observer that counts."""

from __future__ import annotations

from collections import Counter

from kvloom import Config, Event, KVSpec, Observer


class CountingObserver(Observer):
    """Counts events by name."""

    type = "kit_counting"

    def __init__(self, config: Config, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self.seen: Counter[str] = Counter()

    def on_event(self, event: Event) -> None:
        self.seen[event.name] += 1
