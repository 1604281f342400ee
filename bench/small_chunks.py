"""Many small chunks: 512 of 256 KiB into host KV, from a disk tier whose files the page cache holds, and from memory.

From disk also by `retrieve_layer`, which reads chunks of this size whole.

The limit, in turn in the same run: the same files read by `readv`, hashed and copied to the KV, by as many threads as
there are processors; for memory, the copies alone. `--quick` does less of each.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import xxhash
from rich.progress import track
from table import Rows

from kvloom import Engine, KVSpec
from kvloom_backend_disk import native_reads

CHUNKS, CHUNK_TOKENS, CHUNK_BYTES = 512, 16, 256 << 10
SPEC = KVSpec(model="bench", num_layers=4, num_kv_heads=8, head_size=128, dtype="bfloat16")
KV = torch.randn(SPEC.blob_shape(CHUNKS * CHUNK_TOKENS)).to(torch.bfloat16)
OUT = torch.zeros_like(KV)
ROUNDS = 3 if "--quick" in sys.argv else 15
THREADS = os.cpu_count() or 1


def tokens(prompt: int) -> torch.Tensor:
    return torch.arange(CHUNKS * CHUNK_TOKENS) + prompt * 1_000_000


def opened(place: Path, memory: str) -> Engine:
    tiers = [{"type": "memory", "capacity": memory}, {"type": "disk", "path": place, "capacity": "2GiB"}]
    return Engine.open({"connector": "plain", "chunk_tokens": CHUNK_TOKENS, "tiers": tiers}, SPEC)


def retrieve(engine: Engine, prompt: int) -> None:
    assert bool(engine.retrieve(tokens(prompt), kv=OUT).all())


def retrieve_layer(engine: Engine, prompt: int) -> None:
    with engine.retrieve_layer(tokens(prompt), kv=OUT) as loading:
        assert bool(loading.result().all())


def in_threads(work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(first,)) for first in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def read(files: list[Path]) -> None:
    """The floor of a tier on disk."""

    def work(first: int) -> None:
        room = memoryview(bytearray(4096 + CHUNK_BYTES))
        chunk = torch.frombuffer(room[4096:], dtype=torch.bfloat16).view(SPEC.blob_shape(CHUNK_TOKENS))
        for number in range(first, CHUNKS, THREADS):
            fd = os.open(files[number], os.O_RDONLY)
            os.fstat(fd)
            assert os.readv(fd, [room]) == len(room)
            os.close(fd)
            xxhash.xxh3_128_digest(room)
            OUT[:, :, number * CHUNK_TOKENS : (number + 1) * CHUNK_TOKENS].copy_(chunk)

    in_threads(work)


def copy(chunks: torch.Tensor) -> None:
    """The floor of memory."""
    for number, chunk in enumerate(chunks):
        OUT[:, :, number * CHUNK_TOKENS : (number + 1) * CHUNK_TOKENS].copy_(chunk)


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    chunks = torch.zeros((CHUNKS, *SPEC.blob_shape(CHUNK_TOKENS)), dtype=torch.bfloat16)
    taken: dict[str, list[float]] = {}
    floors: dict[str, list[float]] = {"disk": [], "memory": []}
    # Of two prompts that do not fit into memory, the one that is asked for is never there.
    with opened(folder / "cold", "96MiB") as cold, opened(folder / "hit", "512MiB") as hit:
        for prompt in (0, 1):
            cold.store(tokens(prompt), kv=KV)
        hit.store(tokens(0), kv=KV)
        assert cold.flush(120) and hit.flush(120)
        files = [
            path for path in (folder / "cold").rglob("*-*") if path.is_file() and path.stat().st_size > CHUNK_BYTES
        ]
        ways: Iterable[tuple[str, bool]] = (("disk, native code", True), ("disk, Python", False))
        for number in track(range(2 * ROUNDS), "reading"):
            floors["disk"].append(seconds(lambda: read(files)))
            floors["memory"].append(seconds(lambda: copy(chunks)))
            for name, native in ways:
                with nullcontext() if native else patch.object(native_reads, "available", lambda: False):
                    taken.setdefault(name, []).append(seconds(partial(retrieve, cold, number % 2)))
                retrieve(cold, 1 - number % 2)
            taken.setdefault("disk, by layers", []).append(seconds(partial(retrieve_layer, cold, number % 2)))
            retrieve(cold, 1 - number % 2)
            taken.setdefault("memory", []).append(seconds(lambda: retrieve(hit, 0)))
    shutil.rmtree(folder)
    rows = Rows("small_chunks")
    for name, some in taken.items():
        limit = "memory" if name == "memory" else "disk"
        rows.spread(f"{name}, chunks a millisecond", some[2:], CHUNKS / 1e3, floors[limit][2:], "of its floor")
    rows.finish()


if __name__ == "__main__":
    main()
