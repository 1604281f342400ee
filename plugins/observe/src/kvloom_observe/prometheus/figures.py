"""The present metrics of one engine: counters from sums of events, gauges from its health, and its histograms."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import kvloom
from kvloom import CounterKey, Event, Request, Totals, Watched

from ..reasons import bounded
from . import metrics as m
from .metrics import Metric

Labels = tuple[str, ...]


class Sample(NamedTuple):
    """One figure. For a histogram `buckets` has how many fell under each bound, and `value` their sum."""

    metric: Metric
    labels: Labels
    value: float
    buckets: tuple[int, ...] = ()


class Figures:
    """Told of events and requests on one thread, asked from another."""

    def __init__(self) -> None:
        self.engine: Watched | None = None
        self._changing = threading.Lock()
        self._sums: dict[tuple[Metric, Labels], float] = {}
        self._histograms: dict[tuple[Metric, Labels], list[float]] = {}

    def event(self, event: Event) -> None:
        """Its time; what else it says is in the engine's counters."""
        if event.name == "retrieved" and event.tier:
            self._time(m.READ_SECONDS, (event.tier,), event.seconds)
        elif event.name == "stored" and event.tier:
            self._time(m.WRITE_SECONDS, (event.tier,), event.seconds)

    def request(self, request: Request) -> None:
        verb = (request.verb,)
        outcome = "error" if request.error else "all" if request.served_tokens >= request.tokens else "part"
        outcome = "none" if outcome == "part" and not request.served_tokens else outcome
        with self._changing:
            self._add(m.REQUESTS, (request.verb, outcome), 1)
            self._add(m.REQUESTED_TOKENS, verb, request.tokens)
            self._add(m.SERVED_TOKENS, verb, request.served_tokens)
            for tier, tokens in request.sources.items():
                if request.verb != "lookup":
                    self._add(m.SOURCE_TOKENS, (tier,), tokens)
            for step in request.steps:
                if step.codec:
                    way = (step.tier, step.codec, step.name)
                    self._add(m.CODEC_KV_BYTES, way, step.bytes)
                    self._add(m.CODEC_SECONDS, way, step.busy_seconds)
        self._time(m.REQUEST_SECONDS, verb, request.seconds)

    def samples(self) -> Iterator[Sample]:
        """All present values. Asks no store."""
        engine = self.engine
        if engine is None:
            return
        yield Sample(m.INFO, (engine.spec.model, engine.fingerprint, kvloom.__version__), 1)
        sums: dict[tuple[Metric, Labels], float] = {}
        for key, totals in engine.counters().items():
            for metric, labels, value in _counted(key, totals):
                sums[metric, labels] = sums.get((metric, labels), 0.0) + value
        with self._changing:
            sums.update(self._sums)
            histograms = {key: list(counts) for key, counts in self._histograms.items()}
        yield from (Sample(metric, labels, value) for (metric, labels), value in sums.items())
        for (metric, labels), (total, *counts) in histograms.items():
            yield Sample(metric, labels, total, tuple(int(count) for count in counts))
        yield from _health(engine)

    def _time(self, metric: Metric, labels: Labels, seconds: float) -> None:
        with self._changing:
            counts = self._histograms.get((metric, labels))
            if counts is None:
                counts = self._histograms[metric, labels] = [0.0] * (len(m.LATENCY_BUCKETS) + 2)
            counts[0] += seconds
            counts[1 + bisect_left(m.LATENCY_BUCKETS, seconds)] += 1

    def _add(self, metric: Metric, labels: Labels, value: float) -> None:
        self._sums[metric, labels] = self._sums.get((metric, labels), 0.0) + value


def _counted(key: CounterKey, totals: Totals) -> Iterator[tuple[Metric, Labels, float]]:
    """The metrics that an event's sums add to."""
    name, tier, reason = key.name, key.tier, bounded(key.name, key.reason)
    if name == "retrieved" and not tier:
        yield m.RETRIEVED_TOKENS, (), totals.tokens
    elif name == "retrieved":
        yield m.READ_CHUNKS, (tier,), totals.chunks
        yield m.READ_BYTES, (tier,), totals.bytes
    elif name == "stored":
        yield m.WRITTEN_CHUNKS, (tier,), totals.chunks
        yield m.WRITTEN_BYTES, (tier,), totals.bytes
    elif name == "missed" and not tier:  # a tier's: the next one may have had it
        yield m.MISSED_TOKENS, (reason,), totals.tokens
    elif name == "promoted":
        yield m.PROMOTED_CHUNKS, (tier,), totals.chunks
    elif name == "evicted":
        yield m.EVICTED_CHUNKS, (tier, reason), totals.chunks
        yield m.EVICTED_BYTES, (tier, reason), totals.bytes
    elif name == "dropped":
        yield m.DROPPED_CHUNKS, (tier, reason), totals.chunks
    elif name == "corrupt":
        yield m.CORRUPT_CHUNKS, (tier,), totals.chunks
    elif name == "tier_error":
        yield m.TIER_ERRORS, (tier, reason), totals.count
    elif name == "tier_paused":
        yield m.PAUSES, (tier, reason), totals.count
    elif name == "blended":
        yield m.BLENDED_TOKENS, (reason,), totals.tokens
    elif name == "observer_lost":
        yield m.LOST_EVENTS, (reason,), totals.count
    elif name == "observer_error":
        yield m.OBSERVER_ERRORS, (reason,), totals.count


def _health(engine: Watched) -> Iterator[Sample]:
    for tier in engine.health().tiers:
        name = (tier.name,)
        yield from (Sample(m.TIER_STATE, (tier.name, state), float(tier.state == state)) for state in m.STATES)
        yield Sample(m.TIER_BLOBS, name, tier.blobs)
        yield Sample(m.TIER_BYTES, name, tier.bytes)
        if tier.capacity is not None:
            yield Sample(m.TIER_CAPACITY, name, tier.capacity)
        yield Sample(m.WAITING_BYTES, name, tier.waiting_bytes)
        yield Sample(m.ABANDONED_CALLS, name, tier.abandoned_calls)
        yield Sample(m.FAILURES, name, tier.failures)
