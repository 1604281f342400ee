"""Print what a test run cost, from the file that TEST_COSTS_FILE named: test_costs.py FILE

The twenty slowest tests by wall time, processor seconds by package, and the largest test process.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

SLOWEST = 20


def package(test: str) -> str:
    """The package that a test belongs to: `core`, `testkit`, `tests`, or `plugins/NAME`."""
    parts = test.split("/")
    return "/".join(parts[:2]) if parts[0] == "plugins" else parts[0]


def main(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    rows = [json.loads(line) for line in lines]
    if not rows:
        return
    print(f"\n=== the {SLOWEST} slowest tests\n{'wall':>9} {'processor':>11}")
    for row in sorted(rows, key=lambda row: -row["wall"])[:SLOWEST]:
        print(f"{row['wall']:7.1f} s {row['processor']:9.1f} s   {row['test']}")
    processor: defaultdict[str, float] = defaultdict(float)
    tests: defaultdict[str, int] = defaultdict(int)
    for row in rows:
        processor[package(row["test"])] += row["processor"]
        tests[package(row["test"])] += 1
    print("\n=== processor time of tests by package")
    for name, seconds in sorted(processor.items(), key=lambda item: -item[1]):
        print(f"{seconds:7.1f} s  {tests[name]:>6} tests   {name}")
    print(f"{sum(processor.values()):7.1f} s  {len(rows):>6} tests   all")
    largest = max(rows, key=lambda row: row["memory"])
    print(f"\nlargest test process: {largest['memory'] / 2**20:,.0f} MiB, reached by {largest['test']}")


main(Path(sys.argv[1]))
