"""The present state of an engine's live view, as JSON values."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import kvloom
from kvloom import Event, Request, Watched

from ..reasons import bounded
from .prefixes import Prefixes
from .series import Series

VERSION = 1
_GIVING = ("retrieve", "retrieve_layer", "load", "load_layers")
"""Verbs that deliver KV to an engine: their requested and served tokens are the hit rate."""
_LATENCIES = 512
_ERRORS = 20


class View:
    """Told of events and requests on one thread, asked from others."""

    def __init__(self, *, prefill_tokens_per_second: float | None, now: Any = time.time) -> None:
        """prefill_tokens_per_second: what a token costs to compute, without which no time saved can be told."""
        self.engine: Watched | None = None
        self._prefill = prefill_tokens_per_second
        self._now = now
        self._began = now()
        self._changing = threading.Lock()
        self._series = Series(now)
        self._prefixes = Prefixes()
        self._seconds: deque[float] = deque(maxlen=_LATENCIES)
        self._tiers: dict[str, _TierTimes] = {}
        self._errors: deque[dict[str, Any]] = deque(maxlen=_ERRORS)
        self._asked = self._served = self._requests = 0
        self._sources: dict[str, int] = {}
        self._copied: dict[str, float] = {}
        """Bytes of KV that came from each tier."""

    def event(self, event: Event) -> None:
        with self._changing:
            if event.name in ("retrieved", "stored") and event.tier:
                times = self._tiers.setdefault(event.tier, _TierTimes())
                read = event.name == "retrieved"
                times.note(read, event)
                self._series.add(**{"read_bytes" if read else "written_bytes": event.bytes})
            elif event.name in ("tier_error", "tier_paused", "tier_resumed", "corrupt"):
                said = bounded(event.name, event.reason)
                self._errors.append({"at": self._now(), "what": event.name, "tier": event.tier, "reason": said})

    def request(self, request: Request) -> None:
        if request.verb not in _GIVING:
            return
        with self._changing:
            self._requests += 1
            self._asked += request.tokens
            self._served += request.served_tokens
            self._seconds.append(request.seconds)
            self._series.add(
                requests=1, asked=request.tokens, served=request.served_tokens, seconds=request.seconds
            )  # fmt: skip
            copied = sum(step.bytes for step in request.steps if step.name == "copy")
            per_token = copied / (sum(request.sources.values()) or 1)
            for tier, tokens in request.sources.items():
                self._sources[tier] = self._sources.get(tier, 0) + tokens
                self._copied[tier] = self._copied.get(tier, 0.0) + tokens * per_token
            if request.served_tokens:
                begin = request.ends[request.first - 1] if request.first else 0
                served = sum(end <= begin + request.served_tokens for end in request.ends)
                if served:
                    self._prefixes.hit(request.keys, request.ends, served)

    def snapshot(self, *, series: bool = False) -> dict[str, Any]:
        """series: with the columns to plot."""
        engine = self.engine
        health = engine.health() if engine is not None else None
        counters = engine.counters() if engine is not None else {}
        with self._changing:
            told: dict[str, Any] = {
                "version": VERSION,
                "at": self._now(),
                "engine": {
                    "instance_id": engine.instance_id if engine else "",
                    "model": engine.spec.model if engine else "",
                    "fingerprint": engine.fingerprint if engine else "",
                    "kvloom": kvloom.__version__,
                    "pid": os.getpid(),
                    "began": self._began,
                },
                "requests": {
                    "count": self._requests,
                    "asked_tokens": self._asked,
                    "served_tokens": self._served,
                    "seconds": quantiles(self._seconds),
                    "lately": self._series.lately(),
                },
                "saved": {
                    "tokens": self._served,
                    "prefill_tokens_per_second": self._prefill,
                    "seconds": self._served / self._prefill if self._prefill else None,
                },
                "tiers": [
                    {**asdict(tier), "served_tokens": self._sources.get(tier.name, 0), **self._times(tier.name)}
                    for tier in (health.tiers if health else ())
                ],
                "prefixes": [{**asdict(one), "saved_tokens": one.saved_tokens} for one in self._prefixes.hottest(20)],
                "errors": list(self._errors),
            }
            if series:
                told["series"] = {str(step): self._series.columns(step) for step in (1, 10)}
        whole = {key: totals for key, totals in counters.items() if key.name != "missed" or not key.tier}
        told["missed"] = _sums(whole, "missed", "tokens")  # a tier's miss is none if the next tier has the chunk
        told["evicted"] = _sums(counters, "evicted", "chunks")
        told["dropped"] = _sums(counters, "dropped", "chunks")
        return told

    def _times(self, tier: str) -> dict[str, Any]:
        """Times and bytes of a tier. Memory reports no reads: its bytes are those of the KV that was copied from it."""
        told = self._tiers.get(tier, _TierTimes()).told()
        return {**told, "read_bytes": told["read_bytes"] or int(self._copied.get(tier, 0))}


class _TierTimes:
    """Times of one tier."""

    def __init__(self) -> None:
        self.read: deque[float] = deque(maxlen=_LATENCIES)
        self.written: deque[float] = deque(maxlen=_LATENCIES)
        self.read_bytes = self.written_bytes = 0

    def note(self, read: bool, event: Event) -> None:
        (self.read if read else self.written).append(event.seconds)
        if read:
            self.read_bytes += event.bytes
        else:
            self.written_bytes += event.bytes

    def told(self) -> dict[str, Any]:
        return {
            "read_seconds": quantiles(self.read),
            "write_seconds": quantiles(self.written),
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
        }


def quantiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """The median and the 99th percentile of the latest ones; None if there are none."""
    ordered = sorted(seconds)
    if not ordered:
        return {"p50": None, "p99": None}
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]}


def _sums(counters: Any, name: str, figure: str) -> dict[str, int]:
    sums: dict[str, int] = {}
    for key, totals in counters.items():
        if key.name == name:
            reason = bounded(name, key.reason) or "-"
            sums[reason] = sums.get(reason, 0) + getattr(totals, figure)
    return sums
