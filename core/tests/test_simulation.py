"""Deterministic simulation of whole engines: see the package `simulation` for what is simulated and what must hold."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from simulation import interrupts
from simulation.campaign import Tally, fresh_base, known_seeds, run_until
from simulation.planted import PLANTS, Plant
from simulation.world import run_seed

HERE = Path(__file__).parent
SHORT_OPS = 2_000
LONG_OPS = int(os.environ.get("SIMULATION_OPS", 200_000))
"""`SIMULATION_OPS=1000000 make test-full` runs a million."""
UNTIL = float(os.environ.get("TEST_UNTIL", "inf"))
REPLAYED = range(300, 302)


def digests(hash_seed: str) -> list[str]:
    """Digests of a few seeds, run in a separate process."""
    command = [sys.executable, "-m", "simulation", "--seed", "300", "--count", str(len(REPLAYED)), "--ops", "80"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"digest (\w+)", done.stdout)


def test_a_seed_replays_its_run() -> None:
    """Everything is in the digest: each choice of the scheduler, each time, each outcome."""
    first = [run_seed(seed, 80).digest for seed in REPLAYED]
    assert len(set(first)) == len(first)
    assert digests("1") == first


@pytest.mark.slow
def test_a_seed_replays_its_run_whatever_the_hash_seed() -> None:
    assert digests("2") == digests("random") == [run_seed(seed, 80).digest for seed in REPLAYED]


def test_every_module_that_moves_kv_can_be_interrupted_anywhere() -> None:
    """A module that is moved must not leave the simulation without a word."""
    changed = {module.__name__: len(changes) for module, changes in interrupts._changes()}
    for name in ("tiers.stored.load", "tiers.memory.tier", "pipeline.load", "memory.pool"):
        assert changed[f"kvloom.{name}"] > 5
    assert all(find_spec(name) for name in interrupts.WHOLE)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant) -> None:
    planted = PLANTS[plant]
    seen = []
    for seed in range(planted.seed, planted.seed + 30):
        with plant():
            violation = run_seed(seed).violation
        seen.append("" if violation is None else violation.kind)
        if seen[-1] in planted.kinds:
            return
    pytest.fail(f"not found in 30 seeds, which said {seen}")


def test_nothing_is_wrong(record_property: Callable[[str, object], None]) -> None:
    """A few fresh seeds."""
    base = fresh_base()
    tally = run_until(lambda tally: tally.ops >= SHORT_OPS, base)
    record_property("said", f"simulation: {tally}, from seed {base}")
    assert not tally.failed, "\n".join(tally.failed)


@pytest.mark.slow
def test_nothing_is_wrong_where_something_once_was() -> None:
    tally = Tally()
    for known in known_seeds():
        tally.add(run_seed(known.seed, known.ops), known.ops)
    assert not tally.failed, "\n".join(tally.failed)


@pytest.mark.slow
def test_nothing_is_wrong_in_many_operations(capsys: pytest.CaptureFixture[str]) -> None:
    base = fresh_base()
    with capsys.disabled():
        print(f"\nsimulation: fresh seeds from {base}", flush=True)
        jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        tally = run_until(lambda tally: tally.ops >= LONG_OPS or time.time() > UNTIL, base, jobs=jobs, total=LONG_OPS)
        print(f"\nsimulation: {tally}")
    assert not tally.failed, "\n".join(tally.failed)
