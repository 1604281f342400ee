"""kvloom's connector meets every requirement of `kvloom check engine`, as any other has to."""

from __future__ import annotations

from conftest import has_amx

from kvloom_testkit.engines.bench import Bench
from kvloom_testkit.engines.running import check
from kvloom_testkit.engines.subject import Subject

TIERS = [{"type": "memory", "capacity": "64MiB"}, {"type": "disk", "path": "{tmp}", "capacity": "1GiB"}]


def test_it_meets_the_requirements_of_connectors() -> None:
    """With saves of answers, too, so that requests are preempted and continued (E10, E12) while they are saved."""
    subject = Subject.named(
        "kvloom_connector_vllm.adapter:KVLoomConnector", chunk=64,
        extra={"config": {"chunk_tokens": 64, "tiers": TIERS, "save_decode_cache": True}},
    )  # fmt: skip
    bench = Bench(subject, short=True)
    try:
        rows = check(bench)
    finally:
        bench.close()
    latents = [] if has_amx() else [("E29", "skipped")]
    assert [(row.id, row.outcome) for row in rows if row.outcome != "met"] == latents, [
        row.reason for row in rows if row.outcome == "not met"
    ]
