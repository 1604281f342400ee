"""The disk tier through the engine: store until written, retrieve warm and cold, verified.

KV is [2, 32 layers, 256 tokens a chunk, 1024] bf16: 33.6 MB a chunk, 16 chunks an operation. Limits are plain file I/O
of the same bytes in the same run. Cold means after dropping the page cache, which needs root.

    python bench/disk_path.py --dir /path/on/the/disk/to/measure
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from table import SPEC, Rows, kv_cache, median_seconds, tokens_of

from kvloom import Engine

CHUNK, CHUNKS, REPEATS = 256, 16, 5
TOKENS = CHUNK * CHUNKS


def drop_caches() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def raw_write(folder: Path, chunks: list[memoryview]) -> None:
    for index, chunk in enumerate(chunks):
        with open(folder / f"raw{index}", "wb", buffering=0) as file:
            file.write(chunk)


def raw_read(folder: Path, into: list[memoryview]) -> None:
    for index, chunk in enumerate(into):
        with open(folder / f"raw{index}", "rb", buffering=0) as file:
            file.readinto(chunk)


def measure(rows: Rows, folder: Path) -> None:
    source, target = kv_cache(TOKENS), torch.zeros(SPEC.blob_shape(TOKENS), dtype=torch.bfloat16)
    flat = [source[:, :, at : at + CHUNK].contiguous() for at in range(0, TOKENS, CHUNK)]
    raw = [memoryview(chunk.view(torch.uint8).numpy().data).cast("B") for chunk in flat]
    gigabytes = source.numel() * source.element_size() / 1e9
    config = {"connector": "plain", "tiers": [{"type": "disk", "path": str(folder / "tier"), "capacity": "12GiB"}]}
    taken: dict[str, list[float]] = {
        name: [] for name in ("write", "warm", "cold", "raw write", "raw warm", "raw cold")
    }
    with Engine.open(config, SPEC) as engine:
        prompts = [tokens_of(TOKENS, seed=100 + index) for index in range(REPEATS + 1)]
        engine.store(prompts[0], kv=source)
        engine.flush()

        def store(prompt: torch.Tensor) -> None:
            engine.store(prompt, kv=source)
            engine.flush()

        def retrieve(prompt: torch.Tensor) -> None:
            target.zero_()
            began = time.perf_counter()
            assert engine.retrieve(prompt, kv=target).all()
            seconds.append(time.perf_counter() - began)
            assert torch.equal(source, target)

        for prompt in prompts[1:]:
            os.sync()  # else one waits for what the other left the kernel to write
            taken["raw write"].append(median_seconds(lambda: raw_write(folder, raw), 1))
            os.sync()
            taken["write"].append(median_seconds(lambda prompt=prompt: store(prompt), 1))
            seconds = taken["warm"]
            retrieve(prompt)
            taken["raw warm"].append(median_seconds(lambda: raw_read(folder, raw), 1))
        for prompt in prompts[1:]:
            if not drop_caches():
                break
            seconds = taken["cold"]
            retrieve(prompt)
            drop_caches()
            taken["raw cold"].append(median_seconds(lambda: raw_read(folder, raw), 1))
    rows.spread("store until written (GB/s)", taken["write"], gigabytes, taken["raw write"], "open and write")
    rows.spread("retrieve, page cache warm (GB/s)", taken["warm"], gigabytes, taken["raw warm"], "open and readinto")
    if taken["cold"]:
        rows.spread(
            "retrieve, page cache cold (GB/s)", taken["cold"], gigabytes, taken["raw cold"], "open and readinto"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd())
    folder = Path(tempfile.mkdtemp(prefix="kvloom-bench-", dir=parser.parse_args().dir))
    try:
        rows = Rows("disk_path")
        measure(rows, folder)
        rows.finish()
    finally:
        shutil.rmtree(folder)
