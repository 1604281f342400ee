"""Events as log lines: the observer to start with."""

from __future__ import annotations

import logging
from typing import Literal

from kvloom import Config, Event, KVSpec, Observer

log = logging.getLogger("kvloom.events")

_TROUBLE = frozenset({"corrupt", "tier_error", "tier_paused"})


class LogConfig(Config):
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The level of events that are not problems."""


class LogObserver(Observer):
    """One line of `key=value` pairs per event, to the logger `kvloom.events`; trouble at WARNING or above."""

    type = "log"
    Config = LogConfig

    def __init__(self, config: LogConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._level = logging.getLevelNamesMapping()[config.level.upper()]

    def on_event(self, event: Event) -> None:
        level = max(self._level, logging.WARNING) if event.name in _TROUBLE else self._level
        if not log.isEnabledFor(level):
            return
        facts = (
            ("tier", event.tier),
            ("chunks", event.chunks),
            ("tokens", event.tokens),
            ("bytes", event.bytes),
            ("seconds", f"{event.seconds:.6f}" if event.seconds else ""),
            ("reason", event.reason),
        )
        log.log(level, "%s %s", event.name, " ".join(f"{name}={value}" for name, value in facts if value))
