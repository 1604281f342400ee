"""Measures the cost of observers for a retrieve from memory: each beside the same engine without, in turn.

python bench/observers.py [--rounds 200]

Chunks of 256 tokens, KV of a small model (16 layers, 4 heads of 64, bfloat16: 16 KiB a token), 1,024 and 8,192 tokens.
Each round retrieves once with every engine, in another order each time; the result is the median of the ratios within a
round, with the quartiles. First the caller's waiting time; then the processor time of the whole process, which includes
the observers' own thread.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from typing import Any

import torch
from table import Rows
from tqdm import tqdm

from kvloom import Engine, KVSpec
from kvloom_testkit.faults import free_port

SPEC = KVSpec("bench", num_layers=16, num_kv_heads=4, head_size=64, dtype="bfloat16")
LENGTHS = (1024, 8192)


def observers() -> dict[str, list[Any]]:
    prometheus = {"type": "prometheus", "port": free_port()}
    traces = {"type": "opentelemetry", "endpoint": "http://127.0.0.1:1/v1/traces", "timeout": 0.2}
    return {
        "none": [], "none, once more": [], "prometheus": [prometheus], "opentelemetry": [traces], "live": ["live"],
        "all three": [prometheus, traces, "live"],
    }  # fmt: skip


def compared(mine: list[float], bare: list[float]) -> str:
    """Extra time within a round: the median and the quartiles."""
    low, middle, high = statistics.quantiles([a / b - 1 for a, b in zip(mine, bare, strict=True)], n=4)
    return f"{middle:+.1%} ({low:+.1%} to {high:+.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp()
    torch.set_num_threads(1)
    rows, rng = Rows("observers"), random.Random(0)
    for length in LENGTHS:
        tokens = torch.arange(length)
        kv = torch.zeros(SPEC.blob_shape(length), dtype=SPEC.torch_dtype)
        with ExitStack() as stack:
            engines = {}
            for name, several in observers().items():
                config = {
                    "connector": "plain", "tiers": [{"type": "memory", "capacity": "512MiB"}], "observers": several,
                    "instance_id": name,
                }  # fmt: skip
                engines[name] = stack.enter_context(Engine.open(config, SPEC))
                engines[name].store(tokens, kv=kv)
            waited: dict[str, list[float]] = {name: [] for name in engines}
            worked: dict[str, list[float]] = {name: [] for name in engines}
            for turn in tqdm(range(given.rounds + 5), desc=f"{length} tokens"):
                for name in rng.sample(list(engines), len(engines)):
                    began, processor = time.perf_counter(), time.process_time()
                    engines[name].retrieve(tokens, kv=kv)
                    took = time.perf_counter() - began
                    engines[name]._events.flush(5.0)
                    if turn >= 5:
                        waited[name].append(took)
                        worked[name].append(time.process_time() - processor)
            for what, taken in (("waited", waited), ("processor", worked)):
                for name in [name for name in taken if name != "none"]:
                    over = compared(taken[name], taken["none"])
                    milliseconds = f"{1e3 * statistics.median(taken[name]):.3f} ms"
                    without = f"{1e3 * statistics.median(taken['none']):.3f} ms without"
                    rows.add(f"{length} tokens, {what}, {name}", f"{milliseconds}, {over}", without)
    rows.finish()


if __name__ == "__main__":
    main()
