"""Processes that meet on one directory: many versions of the same KV, in which every byte identifies its version.

A chunk's first eight bytes are its version (who wrote it, and when), the others follow from version and place. So a
reader can tell a whole chunk from one of two halves, without knowing the writes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import threading
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection

import numpy
import torch
from reliability_support import open_engine, tokens_of

from kvloom import BackendError, Engine, KVSpec

SPEC = KVSpec(model="versions", num_layers=2, num_kv_heads=4, head_size=128, dtype="uint8")
CHUNK = 64
"""128 KiB of KV: long enough for O_DIRECT."""
CHUNK_BYTES = CHUNK * 2 * 2 * 512
CAPACITY_BYTES = 3 << 20
"""Room for less than half of it all."""
PROMPTS = [tokens_of(CHUNK * (1 + seed % 4), seed) for seed in range(12)]
SALTS = ("", "", "tenant")
_LEAST_STEPS = 20
"""Least number of steps of a thread: on a busy machine the time is over before anything has met."""


def open_on(path: str) -> Engine:
    return open_engine(
        {"type": "memory", "capacity": "2MiB"},
        {"type": "disk", "path": path, "capacity": f"{CAPACITY_BYTES}B", "deadline": "60s"},
        spec=SPEC,
        chunk_tokens=CHUNK,
    )


def written(prompt: int, version: int) -> torch.Tensor:
    """The KV of a prompt in one version."""
    chunks = [_chunk(prompt, at, version) for at in range(len(PROMPTS[prompt]) // CHUNK)]
    return torch.cat(chunks, dim=2)


def _chunk(prompt: int, at: int, version: int) -> torch.Tensor:
    noise = numpy.random.Generator(numpy.random.PCG64([prompt, at, version])).bytes(CHUNK_BYTES - 8)
    data = bytearray(version.to_bytes(8, "little") + noise)
    return torch.frombuffer(data, dtype=torch.uint8).view(2, 2, CHUNK, 512)


def versions(prompt: int, got: torch.Tensor, mask: torch.Tensor) -> list[int | None]:
    """The version of each chunk, None for a miss. Fails if one is not exactly one version."""
    seen: list[int | None] = []
    for at, here in enumerate(mask[::CHUNK].tolist()):
        chunk = got[:, :, at * CHUNK : (at + 1) * CHUNK].contiguous()
        version = int.from_bytes(bytes(chunk.view(-1)[:8].tolist()), "little")
        assert torch.equal(chunk, _chunk(prompt, at, version)) if here else not chunk.any(), "no version, or two"
        seen.append(version if here else None)
    return seen


class Visitor:
    """One process: threads that use one engine."""

    def __init__(self, path: str, who: int, seconds: float) -> None:
        self._who = who
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.failure = ""
        self._turn = 0
        with open_on(path) as engine:
            self._until = time.monotonic() + seconds  # opening may take longer than that on a busy machine
            threads = [threading.Thread(target=self._work, args=(engine, n)) for n in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for key, totals in engine.counters().items():
                if key.name in ("evicted", "corrupt") and key.tier == "disk":
                    self._counts[key.name] += totals.chunks

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def _work(self, engine: Engine, thread: int) -> None:
        rng = random.Random(self._who * 100 + thread)
        try:
            for step in itertools.count():
                if self.failure or (step >= _LEAST_STEPS and time.monotonic() >= self._until):
                    return
                verb = self._step(engine, rng)
                with self._lock:
                    self._counts[verb] += 1
        except BaseException:
            self.failure = traceback.format_exc()

    def _step(self, engine: Engine, rng: random.Random) -> str:
        prompt, salt, roll = rng.randrange(len(PROMPTS)), rng.choice(SALTS), rng.random()
        tokens = PROMPTS[prompt]
        if roll < 0.3:
            engine.store(tokens, kv=written(prompt, self._next_version()), salt=salt)
            return "stores"
        if roll < 0.8:
            got = torch.zeros(SPEC.blob_shape(len(tokens)), dtype=torch.uint8)
            if roll < 0.7:
                mask = engine.retrieve(tokens, kv=got, salt=salt)
            else:
                task = engine.load(engine.segments(tokens, salt=salt), kv=got)
                mask = task.result().repeat_interleave(CHUNK)
            self._judge(versions(prompt, got, mask))
            return "reads"
        if roll < 0.85:
            engine.prefetch(tokens, salt=salt)
            return "prefetches"
        if roll < 0.9:
            engine.lookup(tokens, salt=salt)
            return "lookups"
        with contextlib.suppress(BackendError):  # somebody else may be in the way: it says so
            engine.remove(tokens, salt=salt) if roll < 0.995 else engine.clear(salt)
        return "purges"

    def _next_version(self) -> int:
        with self._lock:
            self._turn += 1
            return self._who << 40 | self._turn

    def _judge(self, seen: list[int | None]) -> None:
        with self._lock:
            self._counts["chunks read"] += len(seen)
            self._counts["missed"] += seen.count(None)
            self._counts["of another process"] += sum(v is not None and v >> 40 != self._who for v in seen)


def visit(path: str, who: int, seconds: float, reports: Connection) -> None:
    """In a process of its own: what was done, or how it failed."""
    logging.disable()
    torch.set_num_threads(1)
    try:
        visitor = Visitor(path, who, seconds)
        reports.send(visitor.failure or visitor.counts)
    except BaseException:
        reports.send(traceback.format_exc())
