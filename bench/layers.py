"""Layer by layer beside all at once: how soon the first layer is there, what it costs in all, what overlap brings.

KV is [2, 32 layers, 256 tokens a chunk, 1024] bf16: 33.6 MB a chunk, 16 chunks a prompt, 0.5 MB for each K and V of a
layer. "Computing" is sleeping, as for a CPU whose device is at work. Both ways take turns in one run. Cold means after
dropping the page cache, which needs root.

    python bench/layers.py --dir /path/on/the/disk/to/measure
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from disk_path import drop_caches
from table import SPEC, Rows, kv_cache, tokens_of

from kvloom import Engine
from kvloom_backend_disk.backend import DiskBackend

TOKENS, REPEATS = 256 * 16, 7
COMPUTE_SECONDS = (0.005, 0.015)
"""Time to compute one layer."""


class Times:
    """Seconds taken, by what was done."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = {}

    def add(self, what: str, seconds: float) -> None:
        self._taken.setdefault(what, []).append(seconds)

    def __getitem__(self, what: str) -> float:
        return statistics.median(self._taken[what])

    def text(self, what: str) -> str:
        taken = self._taken[what]
        return f"{self[what] * 1e3:.0f} ms ({min(taken) * 1e3:.0f} to {max(taken) * 1e3:.0f})"


def at_once(engine: Engine, prompt: torch.Tensor, kv: torch.Tensor, compute: float) -> float:
    began = time.perf_counter()
    assert engine.retrieve(prompt, kv=kv).all()
    for _ in range(SPEC.num_layers if compute else 0):
        time.sleep(compute)
    return time.perf_counter() - began


def by_layer(engine: Engine, prompt: torch.Tensor, kv: torch.Tensor, compute: float) -> tuple[float, float]:
    """Seconds until the first layer was there, and in all."""
    began = time.perf_counter()
    first = 0.0
    with engine.retrieve_layer(prompt, kv=kv) as loading:
        for _, mask in loading:
            first = first or time.perf_counter() - began
            assert mask.all()
            if compute:
                time.sleep(compute)
    return first, time.perf_counter() - began


def load(rows: Rows, name: str, engine: Engine, prompt: torch.Tensor, source: torch.Tensor, *,
         before: Callable[[], Any]) -> None:  # fmt: skip
    """before: puts the tiers back into the state that is measured."""
    times, target = Times(), torch.zeros_like(source)
    for round in range(REPEATS + 1):
        keep = times if round else Times()  # the first round touches memory for the first time
        for compute in (0.0, *COMPUTE_SECONDS):
            before()
            busy = time.process_time()
            keep.add(f"at once {compute}", at_once(engine, prompt, target, compute))
            keep.add(f"busy at once {compute}", time.process_time() - busy)
            before()
            target.zero_()
            busy = time.process_time()
            first, total = by_layer(engine, prompt, target, compute)
            keep.add(f"busy layers {compute}", time.process_time() - busy)
            assert torch.equal(source, target)
            keep.add(f"first {compute}", first)
            keep.add(f"layers {compute}", total)
    whole, first, total = "at once 0.0", "first 0.0", "layers 0.0"
    rows.add(
        f"{name}: first layer usable", times.text(first), f"{times.text(whole)} retrieve", times[first] / times[whole]
    )
    rows.add(f"{name}: all layers", times.text(total), f"{times.text(whole)} retrieve", times[total] / times[whole])
    whole, total = "busy at once 0.0", "busy layers 0.0"
    rows.add(
        f"{name}: all layers, processor time",
        times.text(total),
        f"{times.text(whole)} retrieve",
        times[total] / times[whole],
    )
    for compute in COMPUTE_SECONDS:
        whole, total = f"at once {compute}", f"layers {compute}"
        label = f"{name}: load, and compute {compute * 1e3:.0f} ms a layer"
        rows.add(label, times.text(total), f"{times.text(whole)} one after the other", times[total] / times[whole])


def store(rows: Rows, engine: Engine, source: torch.Tensor) -> None:
    """Into memory: what the caller waits for."""
    times = Times()
    for round in range(REPEATS + 1):
        keep = times if round else Times()
        engine.clear()
        began = time.perf_counter()
        engine.store(tokens_of(TOKENS, seed=1), kv=source)
        keep.add("at once", time.perf_counter() - began)
        engine.clear()
        began = time.perf_counter()
        with engine.store_layer(tokens_of(TOKENS, seed=1), kv=source) as storing:
            for layer in range(SPEC.num_layers):
                storing.layer(layer)
            storing.finish()
        keep.add("layers", time.perf_counter() - began)
    rows.add(
        "memory: store all layers",
        times.text("layers"),
        f"{times.text('at once')} store",
        times["layers"] / times["at once"],
    )


def ranges(rows: Rows, backend: DiskBackend) -> None:
    """One thread reads a blob that the page cache holds range by range, and verifies each."""
    blob, into = torch.randint(0, 256, (32 << 20,), dtype=torch.uint8), bytearray(32 << 20)
    backend.put("ranges", [memoryview(blob.numpy())])
    view, whole = memoryview(into), Times()
    backend.get("ranges")
    for _ in range(REPEATS):
        for step in (128 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20):
            began = time.perf_counter()
            for at in range(0, len(view), step):
                assert backend.get_range("ranges", at, view[at : at + step])
                xxhash.xxh3_128_digest(view[at : at + step])
            whole.add(str(step), time.perf_counter() - began)
    for step in (128 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20):
        rows.add(f"ranges of {step >> 10} KiB, read and verified (GB/s)", f"{len(view) / whole[str(step)] / 1e9:.2f}")
    backend.delete("ranges")


def main(folder: Path) -> None:
    # A copy that torch splits over threads waits for the slowest: with a busy neighbour on one of two cores, copies of
    # a layer took ten times as long. Both ways copy on one thread.
    torch.set_num_threads(1)
    rows = Rows("layers")
    ranges(rows, DiskBackend(DiskBackend.Config(path=folder / "ranges", direct="never")))
    source, prompt = kv_cache(TOKENS), tokens_of(TOKENS, seed=0)
    disk = {"type": "disk", "path": str(folder / "kv"), "capacity": "8GiB"}

    def opened(*tiers: Any) -> Engine:
        engine = Engine.open({"connector": "plain", "tiers": list(tiers)}, SPEC)
        while not engine._stack.memory.pool.pages.settled:
            time.sleep(0.1)
        return engine

    def warm() -> None:
        """Everything into the page cache."""
        for path in (folder / "kv").rglob("*"):
            if path.is_file():
                path.read_bytes()

    memory = {"type": "memory", "capacity": "2GiB"}
    with opened(memory) as engine:
        store(rows, engine, source)
        engine.store(prompt, kv=source)
        load(rows, "memory", engine, prompt, source, before=lambda: None)
    with opened(disk) as engine:
        engine.store(prompt, kv=source)
        engine.flush()
        warm()
        load(rows, "disk, page cache", engine, prompt, source, before=lambda: None)
        if drop_caches():
            load(rows, "disk, cold", engine, prompt, source, before=drop_caches)
        warm()
    with opened(memory, disk) as engine:
        held = engine._stack.memory
        name = "disk, page cache, into memory"
        load(rows, name, engine, prompt, source, before=lambda: held.remove(held.chunks()))
    rows.finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd())
    folder = Path(tempfile.mkdtemp(prefix="kvloom-bench-", dir=parser.parse_args().dir))
    try:
        main(folder)
    finally:
        shutil.rmtree(folder)
