"""kvloom's counters through vLLM's own hooks: the log line every few seconds, and /metrics of `vllm serve`."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_SUMS = ("events", "chunks", "tokens", "bytes", "seconds")


class Stats(KVConnectorStats):
    """`data`: `event|tier|reason` to events, chunks, tokens, bytes and seconds since the last report."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        for key, new in other.data.items():
            old = self.data.get(key)
            self.data[key] = list(new) if old is None else [a + b for a, b in zip(old, new, strict=True)]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Tokens and bytes by event and tier, for the log."""
        found: dict[str, int | float] = {}
        for key, sums in self.data.items():
            name = "_".join(part for part in key.split("|")[:2] if part)
            found[f"{name}_tokens"] = found.get(f"{name}_tokens", 0) + sums[2]
            if sums[3]:
                found[f"{name}_MiB"] = round(found.get(f"{name}_MiB", 0) + sums[3] / 2**20, 1)
        return found

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """`kvloom_<sum>_total{event, tier, reason}` beside vLLM's own labels."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters = [
            counter(
                name=f"kvloom_{name}",
                documentation=f"{name} of KV by what happened, in which tier, and why",
                labelnames=[*labelnames, "event", "tier", "reason"],
            )
            for name in _SUMS
        ]

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for key, sums in transfer_stats_data.items():
            event, tier, reason = key.split("|", 2)
            for counter, value in zip(self._counters, sums, strict=True):
                if value > 0:
                    counter.labels(*labels, event, tier, reason).inc(value)
