"""Counts for each of the last seconds, and for each ten seconds of the last hour."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

NAMES = ("requests", "asked", "served", "seconds", "read_bytes", "written_bytes")
_STEPS = ((1, 300), (10, 360))
"""Seconds of a bucket, and how many are kept."""


class Series:
    """Sums of figures in buckets of time. Nothing ticks: a bucket is made when something falls into it."""

    def __init__(self, now: Callable[[], float]) -> None:
        """now: seconds since the epoch."""
        self._now = now
        self._buckets: dict[int, OrderedDict[int, list[float]]] = {step: OrderedDict() for step, _ in _STEPS}

    def add(self, **values: float) -> None:
        now = self._now()
        for step, most in _STEPS:
            buckets, at = self._buckets[step], int(now // step)
            sums = buckets.get(at)
            if sums is None:
                sums = buckets[at] = [0.0] * len(NAMES)
                while len(buckets) > most:
                    buckets.popitem(last=False)
            for name, value in values.items():
                sums[NAMES.index(name)] += value

    def lately(self, seconds: int = 10) -> dict[str, float]:
        """Per second, over the last whole seconds."""
        now, buckets = int(self._now()), self._buckets[1]
        sums = [0.0] * len(NAMES)
        for at in range(now - seconds, now):
            for index, value in enumerate(buckets.get(at, ())):
                sums[index] += value
        return {name: value / seconds for name, value in zip(NAMES, sums, strict=True)}

    def columns(self, step: int) -> dict[str, list[float]]:
        """For plots: the beginnings of the buckets, and a column for each name; gaps are zeros."""
        buckets = self._buckets[step]
        if not buckets:
            return {"at": [], **{name: [] for name in NAMES}}
        most = dict(_STEPS)[step]
        last = int(self._now() // step)
        first = max(min(buckets), last - most + 1)
        rows = [buckets.get(at, [0.0] * len(NAMES)) for at in range(first, last + 1)]
        at = [float(one * step) for one in range(first, last + 1)]
        return {"at": at, **{name: [row[index] for row in rows] for index, name in enumerate(NAMES)}}
