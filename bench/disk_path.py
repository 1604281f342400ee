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
from table import SPEC, Rows, kv_cache, median_seconds, say_once, tokens_of

from kvloom import Engine

CHUNK, CHUNKS, REPEATS = 256, 16, 5
TOKENS = CHUNK * CHUNKS


def drop_caches() -> bool:
    """Drop the page cache; return whether that is permitted."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        say_once(f"cold reads are left out: dropping the page cache needs root ({error.strerror})")
        return False
    return True


def raw_write(folder: Path, chunks: list[memoryview]) -> None:
    """New files each time, as a cache writes them."""
    for index, chunk in enumerate(chunks):
        with open(folder / str(index), "xb", buffering=0) as file:
            file.write(chunk)


def raw_read(paths: list[Path], into: list[memoryview]) -> None:
    for path, chunk in zip(paths, into, strict=True):
        with open(path, "rb", buffering=0) as file:
            file.readinto(chunk)


class Work:
    """The KV that is stored and retrieved, and plain I/O of the same bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = kv_cache(TOKENS)
        self.target = torch.zeros_like(self.source)
        flat = [self.source[:, :, at : at + CHUNK].contiguous() for at in range(0, TOKENS, CHUNK)]
        self.raw = [memoryview(chunk.view(torch.uint8).numpy().data).cast("B") for chunk in flat]
        self.raw_files = folder / "raw"
        self.gigabytes = self.source.numel() * self.source.element_size() / 1e9
        self.prompts = [tokens_of(TOKENS, seed=100 + index) for index in range(REPEATS + 1)]

    def write_raw(self) -> float:
        """Time of writing; the files of the last round are deleted first, and their memory is free again."""
        shutil.rmtree(self.raw_files, ignore_errors=True)
        self.raw_files.mkdir()
        os.sync()  # else one waits for what another left the kernel to write
        return median_seconds(lambda: raw_write(self.raw_files, self.raw), 1)

    def read_raw(self) -> None:
        raw_read(list(self.raw_files.iterdir()), self.raw)

    def retrieve(self, engine: Engine, prompt: torch.Tensor) -> float:
        self.target.zero_()
        began = time.perf_counter()
        mask = engine.retrieve(prompt, kv=self.target)
        seconds = time.perf_counter() - began
        assert mask.all() and torch.equal(self.source, self.target)
        return seconds


def measure(rows: Rows, work: Work, direct: str) -> None:
    path = work.folder / direct
    tier = {"type": "disk", "path": str(path), "capacity": "12GiB", "direct": direct}
    taken: dict[str, list[float]] = {
        name: [] for name in ("write", "again", "cold", "raw write", "raw warm", "raw cold")
    }
    with Engine.open({"connector": "plain", "tiers": [tier]}, SPEC) as engine:
        while not engine._stack.memory.pool.pages.settled:
            time.sleep(0.1)

        def store(prompt: torch.Tensor) -> None:
            engine.store(prompt, kv=work.source)
            engine.flush()

        for prompt in work.prompts:
            taken["raw write"].append(work.write_raw())
            os.sync()
            taken["write"].append(median_seconds(lambda prompt=prompt: store(prompt), 1))
        for prompt in work.prompts[1:]:
            work.retrieve(engine, prompt)
            taken["again"].append(work.retrieve(engine, prompt))
            work.read_raw()
            taken["raw warm"].append(median_seconds(work.read_raw, 1))
        for prompt in work.prompts[1:]:
            if not drop_caches():
                break
            taken["cold"].append(work.retrieve(engine, prompt))
            drop_caches()
            taken["raw cold"].append(median_seconds(work.read_raw, 1))
    for what, name, limit in (
        ("store until written", "write", "open and write"),
        ("retrieve again", "again", "open and readinto"),
        ("retrieve, page cache dropped", "cold", "open and readinto"),
    ):
        theirs = {"write": "raw write", "again": "raw warm", "cold": "raw cold"}[name]
        if taken[name]:
            label = f"disk {direct}: {what} (GB/s)"
            rows.spread(label, taken[name][-REPEATS:], work.gigabytes, taken[theirs][-REPEATS:], limit)
    shutil.rmtree(path)
    shutil.rmtree(work.raw_files)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd())
    folder = Path(tempfile.mkdtemp(prefix="kvloom-bench-", dir=parser.parse_args().dir))
    try:
        rows = Rows("disk_path")
        work = Work(folder)
        for direct in ("auto", "never"):
            measure(rows, work, direct)
        rows.finish()
    finally:
        shutil.rmtree(folder)
