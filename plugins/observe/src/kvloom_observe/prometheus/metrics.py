"""Every metric: its name, its help, and its labels beside `engine`. docs/use/observe.md has this table."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """name: as Prometheus shows it, a counter's without `_total`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


LATENCY_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds, in seconds."""

RETRIEVED_TOKENS = Metric("kvloom_retrieved_tokens", "counter", "Tokens whose KV was written into the engine's.")
MISSED_TOKENS = Metric(
    "kvloom_missed_tokens", "counter", "Tokens of chunks and pieces that were asked for and not given.", ("reason",)
)
REQUESTED_TOKENS = Metric("kvloom_requested_tokens", "counter", "Tokens that requests asked for.", ("verb",))
SERVED_TOKENS = Metric("kvloom_served_tokens", "counter", "Tokens that requests were given, or had kept.", ("verb",))
REQUESTS = Metric("kvloom_requests", "counter", "Requests.", ("verb", "outcome"))
SOURCE_TOKENS = Metric("kvloom_source_tokens", "counter", "Tokens given, by the tier that had them.", ("tier",))
READ_CHUNKS = Metric("kvloom_read_chunks", "counter", "Chunks that a tier gave, verified.", ("tier",))
READ_BYTES = Metric("kvloom_read_bytes", "counter", "Bytes of the blobs of these.", ("tier",))
WRITTEN_CHUNKS = Metric("kvloom_written_chunks", "counter", "Chunks that were written to a tier.", ("tier",))
WRITTEN_BYTES = Metric("kvloom_written_bytes", "counter", "Bytes of the blobs of these.", ("tier",))
CODEC_KV_BYTES = Metric(
    "kvloom_codec_kv_bytes", "counter", "Bytes of KV that a codec took or gave.", ("tier", "codec", "way")
)
CODEC_SECONDS = Metric(
    "kvloom_codec_seconds", "counter", "Time in a codec, of all its threads.", ("tier", "codec", "way")
)
PROMOTED_CHUNKS = Metric("kvloom_promoted_chunks", "counter", "Chunks that came up to memory.", ("tier",))
EVICTED_CHUNKS = Metric("kvloom_evicted_chunks", "counter", "Chunks that a tier let go.", ("tier", "reason"))
EVICTED_BYTES = Metric("kvloom_evicted_bytes", "counter", "Bytes of these.", ("tier", "reason"))
DROPPED_CHUNKS = Metric(
    "kvloom_dropped_chunks", "counter", "Chunks that were offered to a tier and not kept.", ("tier", "reason")
)
CORRUPT_CHUNKS = Metric(
    "kvloom_corrupt_chunks", "counter", "Blobs that were not what was stored; none was served.", ("tier",)
)
TIER_ERRORS = Metric("kvloom_tier_errors", "counter", "Calls of a store that failed or were late.", ("tier", "reason"))
PAUSES = Metric("kvloom_tier_pauses", "counter", "How often a tier was given up for a time.", ("tier", "reason"))
BLENDED_TOKENS = Metric("kvloom_blended_tokens", "counter", "Tokens of blended prompts.", ("how",))
LOST_EVENTS = Metric("kvloom_lost_events", "counter", "Events that observers were too slow for.", ("reason",))
OBSERVER_ERRORS = Metric("kvloom_observer_errors", "counter", "Errors that observers raised.", ("observer",))
REQUEST_SECONDS = Metric("kvloom_request_seconds", "histogram", "How long requests took.", ("verb",))
READ_SECONDS = Metric(
    "kvloom_tier_read_seconds", "histogram", "How long a chunk took to be read and verified.", ("tier",)
)
WRITE_SECONDS = Metric(
    "kvloom_tier_write_seconds", "histogram", "How long a chunk took to be encoded and written.", ("tier",)
)
TIER_STATE = Metric("kvloom_tier_state", "gauge", "1 for the state that a tier is in.", ("tier", "state"))
TIER_BLOBS = Metric("kvloom_tier_blobs", "gauge", "Chunks in a tier, as far as this process knows.", ("tier",))
TIER_BYTES = Metric("kvloom_tier_bytes", "gauge", "Bytes of these.", ("tier",))
TIER_CAPACITY = Metric(
    "kvloom_tier_capacity_bytes", "gauge", "What a tier may hold, where kvloom bounds it.", ("tier",)
)
WAITING_BYTES = Metric(
    "kvloom_tier_waiting_bytes", "gauge", "Bytes that were accepted and are not written yet.", ("tier",)
)
ABANDONED_CALLS = Metric(
    "kvloom_tier_abandoned_calls", "gauge", "Calls past their deadline that have not returned.", ("tier",)
)
FAILURES = Metric("kvloom_tier_failures_in_a_row", "gauge", "Failures of a tier since it last worked.", ("tier",))
INFO = Metric("kvloom_engine_info", "gauge", "1 for each engine, with what it is.", ("model", "fingerprint", "version"))

STATES = ("ok", "paused", "read only", "stuck", "neglected", "degraded")
METRICS = tuple(value for value in dict(globals()).values() if isinstance(value, Metric))
