"""Many seeds, one after the other or on several processors: counted, and how to repeat those that fail."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from simulation.world import DEFAULT_OPS, Outcome, run_seed

SEEDS = Path(__file__).with_name("seeds.txt")


class Known(NamedTuple):
    """A seed that once failed."""

    seed: int
    ops: int
    what: str


def known_seeds() -> list[Known]:
    """The seeds in `seeds.txt`."""
    lines = [line for line in SEEDS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    parts = [line.split(maxsplit=2) for line in lines]
    return [Known(int(seed), int(ops), what) for seed, ops, what in parts]


def fresh_base() -> int:
    """A first seed that nobody has run before, as likely as not."""
    return int.from_bytes(os.urandom(5), "big")


def repeat(seed: int | str, ops: int) -> str:
    """The command that runs a seed again."""
    return f"make simulate SEED={seed} OPS={ops}"


@dataclass
class Tally:
    """The sums of many runs."""

    seeds: int = 0
    ops: int = 0
    served_chunks: int = 0
    faults: int = 0
    virtual_seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)
    failed: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome, ops: int) -> None:
        """ops: how many operations the seed was given."""
        self.seeds += 1
        self.ops += outcome.ops
        self.served_chunks += outcome.served_chunks
        self.faults += outcome.faults
        self.virtual_seconds += outcome.seconds
        if outcome.violation is not None:
            self.failed.append(f"seed {outcome.seed}: {outcome.violation}\nrepeat: {repeat(outcome.seed, ops)}")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def __str__(self) -> str:
        return (
            f"{self.ops:,} operations in {self.seeds:,} seeds, {self.served_chunks:,} chunks served and checked, "
            f"{self.faults:,} faults, {self.virtual_seconds:,.0f} virtual seconds in {self.seconds:.0f} s "
            f"({self.ops / max(self.seconds, 1e-9):,.0f} operations/s), {len(self.failed)} failed"
        )


class Progress:
    """A line that is written over on a terminal; elsewhere one every half minute."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._out = sys.stdout
        self._next = 0.0

    def show(self, tally: Tally) -> None:
        now, terminal = time.monotonic(), self._out.isatty()
        if now < self._next:
            return
        self._next = now + (0.2 if terminal else 30.0)
        part = min(1.0, tally.ops / self._total)
        left = tally.seconds * (1 - part) / part if part else 0.0
        bar = ("#" * round(30 * part)).ljust(30, ".")
        self._out.write(("\r" if terminal else "") + f"[{bar}] {part:4.0%} {left:4.0f} s left, {tally}")
        self._out.write("" if terminal else "\n")
        self._out.flush()


def outcomes(seeds: Iterator[int], ops: int, *, jobs: int = 1) -> Iterator[Outcome]:
    """The outcome of each seed, with `jobs` of them running at a time; in any order if that is more than one."""
    if jobs == 1:
        yield from (run_seed(seed, ops) for seed in seeds)
        return
    # Fresh interpreters: a forked one would not have the threads that torch believes it has.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        try:
            running = {pool.submit(run_seed, seed, ops) for seed in itertools.islice(seeds, 2 * jobs)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {pool.submit(run_seed, seed, ops) for seed in itertools.islice(seeds, len(done))}
                yield from (one.result() for one in done)
        finally:
            pool.shutdown(cancel_futures=True)


def run_until(
    enough: Callable[[Tally], bool], first: int, ops: int = DEFAULT_OPS, *, jobs: int = 1, total: int = 0,
    tally: Tally | None = None, most_failures: int = 3,
) -> Tally:  # fmt: skip
    """Run seeds from `first` on until it is enough, or `most_failures` failed. total: operations that it will take."""
    tally = tally or Tally()
    progress = Progress(total) if total else None
    with closing(outcomes(itertools.count(first), ops, jobs=jobs)) as all_outcomes:
        for outcome in all_outcomes:
            tally.add(outcome, ops)
            if progress is not None:
                progress.show(tally)
            if enough(tally) or len(tally.failed) >= most_failures:
                break
    return tally
