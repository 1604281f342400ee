"""kvloom's connector meets every requirement of `kvloom check engine`, as any other has to."""

from __future__ import annotations

from kvloom_testkit.engines.bench import Bench
from kvloom_testkit.engines.running import check
from kvloom_testkit.engines.subject import Subject

LATENTS = ("E29", "skipped")
"""vLLM has no prefix cache for latents on processors without AMX."""
TIERS = [{"type": "memory", "capacity": "64MiB"}, {"type": "disk", "path": "{tmp}", "capacity": "1GiB"}]


def test_it_meets_the_requirements_of_connectors() -> None:
    subject = Subject.named(
        "kvloom_connector_vllm.adapter:KVLoomConnector", chunk=64,
        extra={"config": {"chunk_tokens": 64, "tiers": TIERS}},
    )  # fmt: skip
    bench = Bench(subject, short=True)
    try:
        rows = check(bench)
    finally:
        bench.close()
    assert [row for row in rows if row.outcome != "met" and (row.id, row.outcome) != LATENTS] == []
