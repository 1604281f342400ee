"""Replaying a trace: seconds for a million requests of 16 blocks, and beside it what reading the lines alone takes.

The trace is made here: conversations of 20 tenants, the popular ones more often (Zipf), which grow by a block with each
turn and begin with their tenant's prompt; what is left of the 16 blocks is new with each request.

    python bench/replay.py [--quick] [--trace FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from table import SPEC, Rows

from kvloom.config import EngineConfig, resolve
from kvloom.plugins.registry import Registry
from kvloom_tools.replay import Replay, Trace, plan_tiers, sweep

BLOCKS, BLOCK_TOKENS = 16, 512
TENANTS, CONVERSATIONS = 20, 50_000
TIERS = {
    "memory of 64 GiB": [{"type": "memory", "capacity": "64GiB"}],
    "memory of 64 GiB, disk of 2 TiB": [
        {"type": "memory", "capacity": "64GiB"},
        {"type": "disk", "path": "/nonexistent/kvloom", "capacity": "2TiB"},
    ],
    "the same, and an object store without a limit": [
        {"type": "memory", "capacity": "64GiB"},
        {"type": "disk", "path": "/nonexistent/kvloom", "capacity": "2TiB"},
        {"type": "fsspec", "url": "s3://nothing/there"},
    ],
    "disk of 2 TiB with tiny_lfu": [
        {"type": "disk", "path": "/nonexistent/kvloom", "capacity": "2TiB", "policy": "tiny_lfu"}
    ],
}


def lines(count: int, seed: int = 0) -> Iterator[str]:
    """Requests in Mooncake's form, some 20 a second."""
    rng = random.Random(seed)
    weights = list(accumulate(1 / (rank + 1) ** 0.9 for rank in range(CONVERSATIONS)))
    turns: Counter[int] = Counter()
    fresh = 1 << 32
    for start in range(0, count, 10_000):
        chosen = rng.choices(range(CONVERSATIONS), cum_weights=weights, k=min(10_000, count - start))
        for at, which in enumerate(chosen, start):
            turn = turns[which]
            turns[which] += 1
            known = 4 + turn % (BLOCKS - 4)
            tenant = which % TENANTS
            ids = [*range(tenant * 2, tenant * 2 + 2), *range(1000 + which * 16, 1000 + which * 16 + known - 2)]
            ids += range(fresh, fresh + BLOCKS - known)
            fresh += BLOCKS - known
            line = {
                "timestamp": 50 * at, "input_length": BLOCKS * BLOCK_TOKENS, "output_length": 100,
                "hash_ids": ids,
            }  # fmt: skip
            yield json.dumps(line) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--trace", type=Path)
    arguments = parser.parse_args()
    count = 50_000 if arguments.quick else 1_000_000
    rows = Rows("replay")
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.trace or Path(folder) / "trace.jsonl"
        if arguments.trace is None:
            with path.open("w") as file:
                file.writelines(lines(count))
        began, cpu = time.perf_counter(), time.process_time()
        read = sum(1 for _ in Trace(path).requests())
        reading, reading_cpu = time.perf_counter() - began, time.process_time() - cpu
        rows.add(f"reading {read:,} requests of {BLOCKS} blocks (s)", f"{reading:.1f}", cpu_seconds=reading_cpu)
        for name, tiers in TIERS.items():
            config = EngineConfig.load({"chunk_tokens": BLOCK_TOKENS, "tiers": tiers})
            resolved = resolve(config, Registry.discover())
            plans = plan_tiers(resolved, chunk_tokens=BLOCK_TOKENS, spec=SPEC)
            replay = Replay(plans, chunk_tokens=BLOCK_TOKENS)
            cpu = time.process_time()
            wall = sweep.replay(Trace(path), [sweep.Run(name, {}, replay)])
            used = time.process_time() - cpu
            hits = sum(replay.sums.hit_chunks.values()) / replay.sums.asked_chunks
            rows.add(
                f"replaying them: {name} (s)", f"{wall:.1f}, of which CPU {used:.1f}", wall_seconds=wall,
                cpu_seconds=used, hit_rate=hits, requests_per_second=read / wall,
            )  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows.add("the most memory that it took (MiB)", f"{peak:,.0f}")
    if not arguments.quick:
        rows.finish()


if __name__ == "__main__":
    main()
