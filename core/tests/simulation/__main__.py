"""`python -m simulation`: run seeds, and say how to repeat one that fails."""

from __future__ import annotations

import argparse
import sys
import time

from simulation.campaign import fresh_base, repeat, run_until
from simulation.world import DEFAULT_OPS, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="the first seed (default: 0; with --total a fresh one)")
    parser.add_argument("--count", type=int, default=1, help="how many seeds, from the first on")
    parser.add_argument("--ops", type=int, default=DEFAULT_OPS, help="operations of each seed, about")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--total", type=int, help="instead of --count: seeds until there were so many operations")
    parser.add_argument("--jobs", type=int, default=1, help="with --total: how many seeds run at a time")
    given = parser.parse_args()
    if given.total is not None:
        return _many(given)
    failed = 0
    first = given.seed or 0
    for seed in range(first, first + given.count):
        began = time.monotonic()
        outcome = run_seed(seed, given.ops, trace=print if given.trace else None)
        verdict = "ok" if outcome.violation is None else "FAILED"
        print(
            f"seed {seed}: {verdict}, {outcome.ops} operations, {outcome.served_chunks} chunks served, "
            f"{outcome.faults} faults, {outcome.seconds:.1f} virtual seconds in {time.monotonic() - began:.2f} s, "
            f"digest {outcome.digest}",
            flush=True,
        )
        if outcome.violation is not None:
            failed += 1
            print(f"{outcome.violation}\nrepeat: {repeat(seed, given.ops)}", flush=True)
    return 1 if failed else 0


def _many(given: argparse.Namespace) -> int:
    first = fresh_base() if given.seed is None else given.seed
    print(f"seeds from {first} on", flush=True)
    tally = run_until(lambda tally: tally.ops >= given.total, first, given.ops, jobs=given.jobs, total=given.total)
    print(f"\n{tally}")
    for failure in tally.failed:
        print(failure)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
