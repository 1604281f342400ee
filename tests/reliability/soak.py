"""Mixed load for as long as wanted: memory, threads and open files stay flat, every byte is right, nothing is lost.

`python tests/reliability/soak.py --minutes 10` prints what it saw and exits with 1 if something grew or went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from reliability_support import (
    GENEROUS_SECONDS,
    WIDE,
    audit,
    eventually,
    forget_memory,
    is_right,
    kv_of,
    ledger_bytes,
    open_engine,
    retrieved,
    tokens_of,
)

from kvloom import BackendError, DeadlineExceeded, Engine

CHUNK = 32
MEMORY_BYTES, DISK_BYTES = 48 << 20, 64 << 20
CALLERS = 4
GROWTH_BYTES = 16 << 20
"""Maximum growth of the process between the middle of a run and its end. Two minutes on a busy machine grew by 11 MiB,
perhaps because threads that come late bring memory of their own; four minutes were flat."""

MAPPED_BYTES = 3 * DISK_BYTES
"""Maximum of what is mapped at once: what both tiers hold, and what they gave up and somebody reads."""


class Sample(NamedTuple):
    """The process at one moment."""

    seconds: float
    own_bytes: int
    """Resident, without what it maps of a file system in memory: how much of that is resident follows the tiers."""
    mapped_bytes: int
    threads: int
    files: int

    @classmethod
    def take(cls, began: float) -> Sample:
        status = Path("/proc/self/status").read_text()
        resident = {kind: int(kib) << 10 for kind, kib in re.findall(r"^Rss(\w+):\s*(\d+) kB", status, re.MULTILINE)}
        mapped_bytes = resident.pop("Shmem", 0)
        return cls(
            time.monotonic() - began,
            sum(resident.values()),
            mapped_bytes,
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
        )


def prompt(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    count = CHUNK * (1 + seed % 6)
    return tokens_of(count, seed), kv_of(count, seed, WIDE)


class Load:
    """Threads that call every verb, on prompts of which some come again and again and some never do."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self.engine = engine
        self.path = path
        self.done = False
        self.failure = ""
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work, args=(n,), daemon=True) for n in range(CALLERS)]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        self.done = True
        for thread in self._threads:
            thread.join(GENEROUS_SECONDS)
            if thread.is_alive():
                self.failure = self.failure or "a caller hangs"

    def _work(self, number: int) -> None:
        rng = random.Random(number)
        verbs = {
            self._store: 30, self._retrieve: 40, self._look: 5, self._prefetch: 6, self._cancel: 4, self._pin: 3,
            self._primitives: 4, self._tier: 3, self._remove: 3, self._clear: 0.1, self._flush: 1, self._damage: 1,
        }  # fmt: skip
        try:
            while not self.done and not self.failure:
                verb = rng.choices(list(verbs), list(verbs.values()))[0]
                # A square: small numbers often; and one in ten that was never seen before nor will be again.
                seed = int(150 * rng.random() ** 2) if rng.random() < 0.9 else rng.getrandbits(40)
                verb(rng, *prompt(seed), rng.choice(["", "", "tenant-a", "tenant-b"]))
                with self._lock:
                    self.counts[verb.__name__.lstrip("_")] += 1
        except BaseException:
            self.failure = traceback.format_exc()

    def _store(self, rng: random.Random, tokens: torch.Tensor, kv: torch.Tensor, salt: str) -> None:
        self.engine.store(tokens, kv=kv, salt=salt)

    def _retrieve(self, rng: random.Random, tokens: torch.Tensor, kv: torch.Tensor, salt: str) -> None:
        hit = retrieved(self.engine, tokens, kv, salt=salt)
        with self._lock:
            self.counts["tokens hit"] += hit

    def _look(self, rng: random.Random, tokens: torch.Tensor, kv: torch.Tensor, salt: str) -> None:
        self.engine.lookup(tokens, salt=salt)
        self.engine.counters()

    def _prefetch(self, rng: random.Random, tokens: torch.Tensor, kv: torch.Tensor, salt: str) -> None:
        self.engine.prefetch(tokens, salt=salt)

    def _cancel(self, rng: random.Random, tokens: torch.Tensor, kv: torch.Tensor, salt: str) -> None:
        segments, got = self.engine.segments(tokens, salt=salt), torch.zeros_like(kv)
        task = self.engine.load(segments, kv=got)
        if rng.random() < 0.5:
            task.cancel()
        else:
            with contextlib.suppress(DeadlineExceeded):
                task.result(rng.uniform(0, 0.002))
        task.cancel()
        for segment in segments:
            part = got[:, :, segment.start : segment.end].contiguous().view(torch.uint8)
            want = kv[:, :, segment.start : segment.end].contiguous().view(torch.uint8)
            assert torch.equal(part, want) or not part.any(), "wrong bytes"

    def _pin(self, rng: random.Random, tokens: torch.Tensor, kv: torch.Tensor, salt: str) -> None:
        self.engine.pin(tokens, salt=salt)
        try:
            retrieved(self.engine, tokens, kv, salt=salt)
        finally:
            self.engine.unpin(tokens, salt=salt)

    def _primitives(self, rng: random.Random, tokens: torch.Tensor, kv: torch.Tensor, salt: str) -> None:
        segments = self.engine.segments(tokens, salt=salt)
        self.engine.find(segments)
        self.engine.save(segments[::2], kv=kv).result(GENEROUS_SECONDS)
        got = torch.zeros_like(kv)
        mask = self.engine.load(segments, kv=got).result(GENEROUS_SECONDS)
        assert is_right(got, kv, mask.repeat_interleave(CHUNK)), "wrong bytes"

    def _tier(self, rng: random.Random, tokens: torch.Tensor, kv: torch.Tensor, salt: str) -> None:
        tier = self.engine.tiers[rng.choice(["memory", "near", "far"])]
        segment = self.engine.segments(tokens, salt=salt)[0]
        tier.put(segment.key, kv[:, :, :CHUNK].contiguous())
        got = tier.get(segment.key)
        assert got is None or torch.equal(got.view(torch.uint8), kv[:, :, :CHUNK].contiguous().view(torch.uint8))

    def _remove(self, rng: random.Random, tokens: torch.Tensor, kv: torch.Tensor, salt: str) -> None:
        with contextlib.suppress(BackendError):
            self.engine.remove(tokens, salt=salt)

    def _clear(self, rng: random.Random, tokens: torch.Tensor, kv: torch.Tensor, salt: str) -> None:
        with contextlib.suppress(BackendError):
            self.engine.clear(salt=salt)

    def _flush(self, rng: random.Random, tokens: torch.Tensor, kv: torch.Tensor, salt: str) -> None:
        assert self.engine.flush(GENEROUS_SECONDS)

    def _damage(self, rng: random.Random, tokens: torch.Tensor, kv: torch.Tensor, salt: str) -> None:
        """Flip a bit of some blob's file."""
        with contextlib.suppress(OSError, IndexError):  # what is listed may be removed meanwhile
            folders = list(self.path.glob("*/*/*/+??"))
            file = rng.choice(list(rng.choice(folders).iterdir()))
            with open(file, "r+b") as blob:
                at = rng.randrange(file.stat().st_size)
                blob.seek(at)
                byte = blob.read(1)[0]
                blob.seek(at)
                blob.write(bytes([byte ^ 1 << rng.randrange(8)]))


def tiers_on(path: Path) -> list[dict[str, Any]]:
    """Memory, and two tiers on disk that have every policy between them."""
    stored: dict[str, Any] = {"type": "disk", "capacity": f"{DISK_BYTES}B", "deadline": "30s"}
    near = {"name": "near", "path": str(path / "near"), "ttl": "40s", "quota": {"tenant-b": "8MiB", "*": "48MiB"}}
    far = {"name": "far", "path": str(path / "far"), "policy": "tiny_lfu", "write": "on_evict"}
    return [{"type": "memory", "capacity": f"{MEMORY_BYTES}B"}, stored | near, stored | far]


class Soaked(NamedTuple):
    """The result of a soak."""

    samples: list[Sample]
    counts: Counter[str]
    events: dict[str, int]
    problems: list[str]


def soak(path: Path, seconds: float) -> Soaked:
    """Load an engine over `path` for `seconds`."""
    problems: list[str] = []
    began = time.monotonic()
    start = Sample.take(began)
    engine = open_engine(*tiers_on(path), spec=WIDE, chunk_tokens=CHUNK)
    load = Load(engine, path)
    samples = [Sample.take(began)]
    while samples[-1].seconds < seconds and not load.failure:
        time.sleep(min(1.0, seconds / 20))
        samples.append(Sample.take(began))
        _show_progress(samples[-1], seconds)
    load.finish()
    if load.failure:
        problems.append(load.failure)
    try:
        eventually(lambda: engine.flush(GENEROUS_SECONDS), "flushed")
        eventually(lambda: all(_is_counted(engine, path, tier) for tier in ("near", "far")), "exact accounting")
        eventually(lambda: engine.health().ok, "good health")
        forget_memory(engine)
    except AssertionError as error:
        problems.append(str(error))
    events = Counter[str]()
    for key, totals in engine.counters().items():
        events[f"{key.name} {key.tier}".strip()] += totals.count
    engine.close()
    try:
        eventually(lambda: Sample.take(began).files <= start.files, "every file closed")
        eventually(lambda: Sample.take(began).mapped_bytes <= start.mapped_bytes, "every blob unmapped")
    except AssertionError as error:
        problems.append(str(error))
    grown = growth(samples, most_threads=MOST_THREADS) if samples[-1].seconds >= WARM_SECONDS else []
    return Soaked(samples, load.counts, dict(events), problems + grown)


def _is_counted(engine: Engine, path: Path, tier: str) -> bool:
    return ledger_bytes(engine, tier) == audit(path / tier).bytes <= DISK_BYTES


WARM_SECONDS = 60.0
"""A shorter run says nothing about what grows: all of it is warming up."""
MOST_THREADS = 48
"""More than all groups of threads of the engine and its tiers together: they start one after the other, as needed."""


def growth(samples: Sequence[Sample], *, most_threads: int = 0) -> list[str]:
    """Growth between the second quarter of the run (all is warm by then) and the last.

    most_threads: number of threads up to which some may still have been starting.
    """
    quarter = len(samples) // 4
    middle, end = samples[quarter : 2 * quarter], samples[-quarter:]
    if not middle:
        return ["too short to say what grew"]
    found = []
    grown = statistics.median(s.own_bytes for s in end) - statistics.median(s.own_bytes for s in middle)
    if grown > GROWTH_BYTES:
        found.append(f"memory grew by {grown / 2**20:.1f} MiB")
    mapped = max(s.mapped_bytes for s in samples) - samples[0].mapped_bytes
    if mapped > MAPPED_BYTES:
        found.append(f"{mapped / 2**20:.1f} MiB are mapped")
    for name in ("threads", "files"):
        most = max(getattr(s, name) for s in middle)
        if max(getattr(s, name) for s in end) > max(most + CALLERS, most_threads if name == "threads" else 0):
            found.append(f"{name} grew beyond {most}")
    return found


def slope_bytes_per_minute(samples: Sequence[Sample]) -> float:
    """Slope of a straight line through the memory of the last three quarters."""
    warm = samples[len(samples) // 4 :]
    if len(warm) < 3:
        return 0.0
    return 60 * statistics.linear_regression([s.seconds for s in warm], [float(s.own_bytes) for s in warm]).slope


def report(soaked: Soaked) -> str:
    samples = soaked.samples
    lines = [f"{'minute':>8} {'memory':>12} {'threads':>8} {'files':>6}"]
    step = max(1, len(samples) // 12)
    low, high = min(s.own_bytes for s in samples), max(s.own_bytes for s in samples)
    for sample in samples[::step]:
        bar = "#" * int(30 * (sample.own_bytes - low) / max(1, high - low))
        memory = f"{sample.own_bytes / 2**20:.1f} MiB"
        lines.append(f"{sample.seconds / 60:>8.2f} {memory:>12} {sample.threads:>8} {sample.files:>6}  {bar}")
    lines.append(f"memory changes by {slope_bytes_per_minute(samples) / 2**20:+.2f} MiB a minute once it is warm")
    lines.append("calls: " + ", ".join(f"{count:,} {name}" for name, count in sorted(soaked.counts.items())))
    lines.append("events: " + ", ".join(f"{count:,} {name}" for name, count in sorted(soaked.events.items())))
    return "\n".join([*lines, *(f"FAILED: {problem}" for problem in soaked.problems)])


def _show_progress(sample: Sample, seconds: float) -> None:
    if sys.stderr.isatty():
        done = int(40 * min(1.0, sample.seconds / seconds))
        text = f"\r[{'#' * done:<40}] {sample.seconds:.0f} of {seconds:.0f} s, {sample.own_bytes / 2**20:.0f} MiB "
        sys.stderr.write(text + ("\n" if sample.seconds >= seconds else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--path", type=Path, help="a directory on the file system to load (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="write every sample there")
    options = parser.parse_args()
    logging.disable()
    torch.set_num_threads(1)
    path = Path(tempfile.mkdtemp(prefix="kvloom-soak-", dir=options.path))
    try:
        soaked = soak(path, 60 * options.minutes)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    print(report(soaked))
    if options.json:
        rows: list[dict[str, Any]] = [sample._asdict() for sample in soaked.samples]
        options.json.write_text(
            json.dumps({"samples": rows, "calls": soaked.counts, "events": soaked.events}, indent=1)
        )
    sys.exit(1 if soaked.problems else 0)


if __name__ == "__main__":
    main()
