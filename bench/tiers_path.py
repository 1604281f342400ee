"""A disk tier from and to the pool, verified, beside fio and plain file I/O; and what policy costs besides.

KV is [2, 32 layers, 256 tokens a chunk, 1024] bf16: 33.6 MB a chunk, 16 chunks an operation. fio (io_uring, direct) is
run at several queue depths and its best counts. Cold means after dropping the page cache, which needs root.

    python bench/tiers_path.py --dir /path/on/the/disk/to/measure
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from disk_path import drop_caches
from table import SPEC, Rows, kv_cache, median_seconds, say_once, tokens_of

from kvloom import Engine, StorageBackend, chain
from kvloom.memory import Pool
from kvloom.plugins.registry import Registry
from kvloom.runtime import SystemRuntime
from kvloom.telemetry.events import EventBus
from kvloom.tiers.memory.tier import MemoryTier
from kvloom.tiers.stored.tier import Policy, StoredTier
from kvloom.tiers.tier import Layout, Loaded
from kvloom.types import EXACT, Chunk, ChunkKey, MemoryFormat

CHUNK, CHUNKS, REPEATS = 256, 16, 5
SHAPE = SPEC.blob_shape(CHUNK)
CHUNK_BYTES = 2 * torch.Size(SHAPE).numel()
GIGABYTES = CHUNKS * CHUNK_BYTES / 1e9
DEPTHS = (1, 2, 4, 8, 16)


def fio(folder: Path, verb: str, depth: int, *, new: bool = False) -> float:
    """GB/s of one sequential pass over as many bytes as an operation moves. new: into a file that was not there."""
    if new:
        (folder / "fio").unlink(missing_ok=True)
    command = [
        "fio", "--name=limit", f"--filename={folder}/fio", f"--rw={verb}", "--bs=4M", f"--size={CHUNKS * 32}M",
        "--ioengine=io_uring", "--direct=1", f"--iodepth={depth}", "--output-format=json", "--end_fsync=0",
    ]  # fmt: skip
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    job = json.loads(run.stdout[run.stdout.index("{") :])["jobs"][0]
    return float(job[verb]["bw_bytes"]) / 1e9


class Disk:
    """A disk tier over a pool, without an engine: chunks are in the pool before a write and after a read."""

    def __init__(self, folder: Path, *, blobs: int) -> None:
        """blobs: so many have room."""
        runtime = SystemRuntime()
        self.events = EventBus((), runtime)
        layout = Layout(MemoryFormat.KV_BLOB, SPEC.torch_dtype, SPEC.blob_shape)
        self.pool = Pool(2 * CHUNKS * CHUNK_BYTES + (64 << 20), runtime)
        self.memory = MemoryTier(layout, self.pool, self.events, runtime, keep=False)
        registry = Registry.discover()
        backend = registry.get("backend", "disk")
        raw = registry.get("serializer", "raw")
        self.backend: StorageBackend = backend(backend.Config(path=folder), SPEC)
        self.tier = StoredTier(
            "disk", layout, self.backend, [raw(raw.Config(), SPEC)], self.memory, self.events, runtime,
            policy=Policy(capacity=blobs * (CHUNK_BYTES + 4096)),
        )  # fmt: skip
        self.rooms = [self.pool.reserve(self.pool.capacity // 2) for _ in range(2)]
        for room in self.rooms:
            assert room is not None
            room.view[:] = bytes(len(room.view))  # every page present
            room.abandon()
        source = kv_cache(CHUNK)
        self.chunks = []
        for _ in range(CHUNKS):
            room = self.pool.reserve(CHUNK_BYTES)
            assert room is not None
            chunk = Chunk(room.tensor(SHAPE, SPEC.torch_dtype), MemoryFormat.KV_BLOB, CHUNK, EXACT)
            chunk.tensor.copy_(source)
            block = room.seal()
            assert block is not None
            self.chunks.append(Loaded(chunk, block.lease(), time.time()))
            block.drop()

    def keys(self, seed: int) -> list[ChunkKey]:
        tokens = tokens_of(CHUNK * CHUNKS, seed=seed)
        return [segment.key for segment in chain(tokens, chunk_tokens=CHUNK, fingerprint="f" * 32)]

    def write(self, seed: int) -> float:
        keys = self.keys(seed)
        began = time.perf_counter()
        for key, chunk in zip(keys, self.chunks, strict=True):
            since = self.memory.invalidations.mark()
            assert self.tier.submit(key, chunk.again(), until=time.monotonic() + 60, since=since)
        assert self.tier.flush(time.monotonic() + 60)
        return time.perf_counter() - began

    def read(self, seed: int) -> float:
        keys = self.keys(seed)
        began = time.perf_counter()
        reads = [self.tier.loads.read(key, SHAPE, CHUNK) for key in keys]
        for read in reads:
            assert read is not None
            loaded = self.tier.loads.collect(read)
            assert loaded is not None
            loaded.release()
        return time.perf_counter() - began

    def close(self) -> None:
        for chunk in self.chunks:
            chunk.release()
        self.tier.close()
        self.memory.close()
        self.pool.close()
        self.events.close()


def read_cached(paths: list[Path], into: memoryview) -> None:
    """Reading from the page cache: files that were written through it, into memory that is present."""
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            assert file.readinto(into) == len(into)


@contextmanager
def unverified() -> Iterator[None]:
    """The same reads without the payload's checksums: what verifying costs."""
    from kvloom import envelope

    filled = envelope.Verifier.filled

    def header_only(self: Any, num_bytes: int) -> None:
        if self._header is None:
            filled(self, min(num_bytes, 1 << 16))
        if self._header is not None:
            self._row = len(self._header.lengths)

    envelope.Verifier.filled = header_only  # type: ignore[method-assign]
    try:
        yield
    finally:
        envelope.Verifier.filled = filled  # type: ignore[method-assign]


def disk(rows: Rows, folder: Path) -> None:
    ours, filling = Disk(folder / "tier", blobs=CHUNKS), Disk(folder / "filling", blobs=100 * CHUNKS)
    plain = [folder / f"plain{index}" for index in range(CHUNKS)]
    into = memoryview(mmap.mmap(-1, CHUNK_BYTES))
    for path in plain:
        path.write_bytes(bytes(CHUNK_BYTES))
    ours.write(-1)  # from now on it is full, and what is written takes the place of what was
    taken: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        taken.setdefault(name, []).append(seconds)

    limits: dict[str, list[float]] = {"new": [], "write": [], "read": []}
    for turn in range(REPEATS):
        for what, rates in limits.items():
            verb = "read" if what == "read" else "write"
            rates.append(max(fio(folder, verb, depth, new=what == "new") for depth in DEPTHS))
            os.sync()
            if verb == "write":
                drop_caches()  # as fio does for its file
                note(what, (filling if what == "new" else ours).write(turn))
                os.sync()
            elif drop_caches():
                for _ in range(3):
                    note("cold", ours.read(turn))
                    drop_caches()
                    with unverified():
                        note("cold, unverified", ours.read(turn))
                    drop_caches()
        for path in plain:
            path.read_bytes()
        for key in ours.keys(turn):
            ours.backend.get(str(key))
            Path(ours.backend._layout.path(str(key))).read_bytes()  # type: ignore[attr-defined]
        note("cached", median_seconds(lambda: read_cached(plain, into), 3))
        note("warm", min(ours.read(turn) for _ in range(3)))
        with unverified():
            note("warm, unverified", min(ours.read(turn) for _ in range(3)))
    ours.close()
    filling.close()

    def limit(what: str) -> list[float]:
        return [GIGABYTES / rate for rate in limits[what]]

    name = "disk: write from the pool into a full tier (GB/s)"
    rows.spread(name, taken["write"], GIGABYTES, limit("write"), "fio, best depth, over a file")
    name = "disk: write from the pool into a tier that fills up"
    rows.spread(name, taken["new"], GIGABYTES, limit("new"), "fio, best depth, a new file")
    if "cold" in taken:
        rows.spread(
            "disk: cold read into the pool, verified", taken["cold"], GIGABYTES, limit("read"), "fio, best depth"
        )
        name = "  the same beside itself without checksums"
        rows.spread(name, taken["cold"], GIGABYTES, taken["cold, unverified"], "unverified")
    rows.spread(
        "disk: warm read into the pool, verified", taken["warm"], GIGABYTES, taken["cached"], "readinto, cached"
    )
    name = "  the same beside itself without checksums"
    rows.spread(name, taken["warm"], GIGABYTES, taken["warm, unverified"], "unverified")


def threads(rows: Rows) -> None:
    """Eight threads store and retrieve different prompts in the memory tier at once; the limit is copy_ in as many."""
    config = {"connector": "plain", "tiers": [{"type": "memory", "capacity": "3GiB"}]}
    chunks, count = 4, 8
    sources = [kv_cache(CHUNK * chunks) for _ in range(count)]
    targets = [torch.zeros_like(source) for source in sources]
    spare = [torch.zeros_like(source) for source in sources]

    def together(work: Callable[[int], None]) -> float:
        gang = [threading.Thread(target=work, args=(index,)) for index in range(count)]
        began = time.perf_counter()
        for one in gang:
            one.start()
        for one in gang:
            one.join()
        return time.perf_counter() - began

    def copies(index: int) -> None:
        for _ in range(2):
            spare[index].copy_(sources[index])
            targets[index].copy_(spare[index])

    with Engine.open(config, SPEC) as engine:

        def verbs(index: int) -> None:
            for turn in range(2):
                prompt = tokens_of(CHUNK * chunks, seed=1000 + 10 * index + turn)
                engine.store(prompt, kv=sources[index])
                assert engine.retrieve(prompt, kv=targets[index]).all()

        together(verbs)
        while not engine._stack.memory.pool.pages.settled:
            time.sleep(0.1)
        ours, limits = [], []
        for _ in range(REPEATS):
            for index in range(count):
                for turn in range(2):
                    engine.remove(tokens_of(CHUNK * chunks, seed=1000 + 10 * index + turn))
            limits.append(together(copies))
            ours.append(together(verbs))
    gigabytes = count * 4 * chunks * CHUNK_BYTES / 1e9
    rows.spread("memory: 8 threads store and retrieve (GB/s)", ours, gigabytes, limits, "copy_ in 8 threads")


def lookups(rows: Rows) -> None:
    count = 128 * 1024
    from dataclasses import replace

    spec = replace(SPEC, num_layers=1, num_kv_heads=1, head_size=1)
    kv = torch.zeros(2, 1, count, 1, dtype=torch.bfloat16)
    prompt = tokens_of(count, seed=5).to(torch.int32)
    for name, tiers in (
        ("memory", [{"type": "memory", "capacity": "64MiB"}]),
        ("stored", [{"type": "memory", "capacity": "64MiB"}, {"type": "dict", "capacity": "64MiB"}]),
    ):
        with Engine.open({"connector": "plain", "tiers": tiers}, spec) as engine:
            engine.store(prompt, kv=kv)
            engine.flush()
            names = [list(engine.tiers)[-1]]
            assert engine.lookup(prompt, names).tokens == count
            seconds = median_seconds(partial(engine.lookup, prompt, names), 51)
            rows.seconds(f"lookup of 131,072 tokens, {name}", seconds)


def frozen(rows: Rows) -> None:
    """A backend that answers questions and then never again: how long callers take over their deadline."""
    from dataclasses import replace

    from kvloom.builtin.dict_backend import DictBackend

    spec = replace(SPEC, num_layers=1, num_kv_heads=1, head_size=8)
    deadline = 0.05
    ice = threading.Event()
    over: list[float] = []
    get, contains = DictBackend.get, DictBackend.contains

    def stop(self: DictBackend, key: str) -> None:
        ice.wait()

    kv = torch.zeros(2, 1, 1024, 8, dtype=torch.bfloat16)
    prompts = [tokens_of(1024, seed=2000 + index) for index in range(1000)]
    tiers = [{"type": "memory", "capacity": "64KiB"}, {"type": "dict", "deadline": deadline}]
    for verb in ("get", "contains"):
        ice.clear()
        with Engine.open({"connector": "plain", "tiers": tiers}, spec) as engine:
            for prompt in prompts[:8]:
                engine.store(prompt, kv=kv)
                engine.flush()
            setattr(DictBackend, verb, stop)
            for index, prompt in enumerate(prompts):
                if index % 50 == 0:  # as if it had come back: the breaker lets everybody try again
                    engine.tiers["dict"].calls.reading.answered()
                    ice.set()
                    time.sleep(0.005)
                    ice.clear()
                began = time.perf_counter()
                engine.retrieve(prompts[index % 8], kv=kv)
                over.append(time.perf_counter() - began - deadline)
                began = time.perf_counter()
                engine.store(prompt, kv=kv)
                over.append(time.perf_counter() - began - deadline)
            ice.set()
            setattr(DictBackend, verb, get if verb == "get" else contains)
    over.sort()
    at = over[int(len(over) * 0.999)]
    late = sum(seconds > 0 for seconds in over)
    text = f"{late} of {len(over)} calls took longer than the deadline"
    rows.add("frozen backend: p99.9 of the caller's return over its deadline of 50 ms", f"{at * 1e3:+.1f} ms", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd())
    parser.add_argument("--only", nargs="*", default=["disk", "threads", "lookups", "frozen"])
    chosen = parser.parse_args()
    if "disk" in chosen.only and shutil.which("fio") is None:
        say_once("the rows of the disk are left out: their limit comes from fio; install it: apt-get install fio")
        chosen.only.remove("disk")
    folder = Path(tempfile.mkdtemp(prefix="kvloom-bench-", dir=chosen.dir))
    rows = Rows("tiers_path")
    try:
        if "disk" in chosen.only:
            disk(rows, folder)
    finally:
        shutil.rmtree(folder)
    for name, measure in (("threads", threads), ("lookups", lookups), ("frozen", frozen)):
        if name in chosen.only:
            measure(rows)
    rows.finish()
