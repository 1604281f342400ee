"""Stores of many small chunks until they are written: 512 of 256 KiB and of 64 KiB, into disk and Redis.

In turn in the same run: written by batches, and one by one. Redis is also measured with half a millisecond more for
each call, as for a server in another rack. `--quick` does less of each; needs `redis-server`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.progress import track
from table import Rows

from kvloom import Engine, KVSpec
from kvloom_backend_redis.backend import RedisBackend
from kvloom_backend_redis.testing import RedisServer

CHUNKS, CHUNK_TOKENS = 512, 16
SIZES = {"256 KiB": 4, "64 KiB": 1}
"""Layers that make a chunk as large."""
AWAY_SECONDS = 5e-4
ROUNDS = 5 if "--quick" in sys.argv else 15


def further_away() -> ExitStack:
    """Each call of the Redis backend that writes takes longer."""
    stack = ExitStack()
    for name in ("put", "put_many"):
        real = getattr(RedisBackend, name)

        def later(*args: Any, real: Any = real) -> None:
            time.sleep(AWAY_SECONDS)
            real(*args)

        stack.enter_context(patch.object(RedisBackend, name, later))
    return stack


def opened(tier: dict[str, Any], spec: KVSpec, *, batches: bool) -> Engine:
    tiers = [{"type": "memory", "capacity": "512MiB"}, tier]
    engine = Engine.open({"connector": "plain", "chunk_tokens": CHUNK_TOKENS, "tiers": tiers}, spec)
    if not batches:
        engine._stack.stored[0]._writes._batch_bytes = 0
    return engine


def seconds(engine: Engine, kv: torch.Tensor) -> float:
    tokens = torch.arange(CHUNKS * CHUNK_TOKENS)
    engine.clear()
    began = time.perf_counter()
    engine.store(tokens, kv=kv)
    assert engine.flush(120)
    taken = time.perf_counter() - began
    assert engine.tiers[engine._stack.stored[0].name].contains(engine.segments(tokens)[-1].key)
    return taken


def main() -> None:
    rows = Rows("small_writes")
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    with RedisServer(maxmemory="1gb", maxmemory_policy="allkeys-lru") as server:
        for size, layers in SIZES.items():
            spec = KVSpec(model=f"bench-{layers}", num_layers=layers, num_kv_heads=8, head_size=128, dtype="bfloat16")
            kv = torch.randn(spec.blob_shape(CHUNKS * CHUNK_TOKENS)).to(torch.bfloat16)
            for store in ("disk", "redis", "redis far away"):
                taken: dict[bool, list[float]] = {True: [], False: []}
                with further_away() if store == "redis far away" else ExitStack() as stack:
                    engines = {}
                    for batches in taken:
                        tier: dict[str, Any] = {"type": "redis", "url": server.url, "prefix": f"{batches}:"}
                        if store == "disk":
                            tier = {"type": "disk", "path": folder / f"{layers}-{batches}", "capacity": "2GiB"}
                        engines[batches] = stack.enter_context(opened(tier, spec, batches=batches))
                    for _ in track(range(ROUNDS + 1), f"{store}, {size}"):
                        for batches, engine in engines.items():
                            taken[batches].append(seconds(engine, kv))
                what = f"{store}, {size}, batches, chunks a millisecond"
                rows.spread(what, taken[True][1:], CHUNKS / 1e3, taken[False][1:], "one by one")
    shutil.rmtree(folder)
    rows.finish()


if __name__ == "__main__":
    main()
