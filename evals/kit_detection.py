"""Tries the kit's own mutants many times each, and counts how often the requirement that they break notices.

    python evals/kit_detection.py [--times TIMES] [--only WORD ...] [--table]

A mutant is a component that is wrong on purpose, in `kvloom_testkit.mutants`. What depends on which thread or process
comes first is tried a hundred times, and counts as found if it is found 99 times; the others are tried three times.
Each result is written to kit_detection.json at once, and what is in there is not tried again: the run may be
interrupted. Ends with status 1 if something is found less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from kvloom import output
from kvloom_testkit import mutants
from kvloom_testkit.cli.check import check
from kvloom_testkit.kinds import CLASSES
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.subjects import Subject

RESULTS = Path(__file__).with_suffix(".json")
SETTINGS: dict[str, dict[str, Any]] = {"backend": {"path": "{tmp}"}}
RACES = {"B09", "B10", "B11", "B18", "B20", "B33", "B36", "B56", "S09", "X14"}
"""Requirements that are about what happens at the same time, or at a chance moment: tried TIMES or `--times` times."""
TIMES = 100
FEW = 3
"""Number of tries for the others."""
ENOUGH = 0.99
SAVED_AS = ("kind", "mutant", "breaks", "about", "times", "found", "seconds")


def name_of(kind: str, cls: type[Any]) -> str:
    return f"{kind}: {cls.__name__}"


def tried(kind: str, cls: type[Any], times: int) -> dict[str, Any]:
    """Number of detections in so many tries."""
    subject, began = Subject(kind, cls.type, cls, SETTINGS.get(kind, {})), time.monotonic()
    (result,) = check(subject, only=[cls.breaks], repeat=times)
    counted = re.match(rf"(\d+) of {times} times: ", result.reason)
    found = int(counted[1]) if counted else times * (result.outcome == "not met" and times == 1)
    if result.outcome == "not met" and not counted and times > 1:  # it has ended the process
        found = sum(check(subject, only=[cls.breaks])[0].outcome == "not met" for _ in range(times))
    about = " ".join((cls.__doc__ or "").split())
    values = (kind, cls.__name__, cls.breaks, about, times, found, round((time.monotonic() - began) / times, 2))
    return dict(zip(SAVED_AS, values, strict=True))


def report(rows: list[dict[str, Any]]) -> str:
    said = (
        "How often the kit finds components that are wrong on purpose, by the requirement that each of them breaks; as "
        "`kvloom check` with its usual effort does. Written by `python evals/kit_detection.py`, on "
        f"{os.cpu_count()} processors with Python {platform.python_version()}."
    )
    races = [row for row in rows if row["breaks"] in RACES]
    others = [row for row in rows if row["breaks"] not in RACES]
    lines = ["# What the kit finds, and how often", "", *textwrap.wrap(said, 120), ""]
    lines += ["## Where it matters what comes first", ""]
    lines += ["| breaks | mutant | what is wrong with it | found | of | seconds each |", "|---|---|---|---:|---:|---:|"]
    for row in races:
        lines.append("| {breaks} | {mutant} | {about} | {found} | {times} | {seconds} |".format(**row))
    lines += ["", "## The others", ""]
    lines += ["| kind | mutants | times each | found each time |", "|---|---:|---:|---:|"]
    for kind in CLASSES:
        if mine := [row for row in others if row["kind"] == kind]:
            times = "to".join(f" {number} " for number in sorted({row["times"] for row in mine})).strip()
            lines.append(f"| {kind} | {len(mine)} | {times} | {sum(row['found'] == row['times'] for row in mine)} |")
    missed = [
        f"{row['mutant']} ({row['breaks']}: {row['found']} of {row['times']})"
        for row in others
        if row["found"] < row["times"]
    ]
    if missed:
        lines += ["", *textwrap.wrap(f"Not found each time: {', '.join(missed)}.", 120)]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, help="how often what races is tried; default: 100")
    parser.add_argument(
        "--only", nargs="*", metavar="WORD", default=[], help="ids of requirements, or names of mutants"
    )
    parser.add_argument("--table", action="store_true", help="only write the table, of what has been tried")
    asked = parser.parse_args()
    rows: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    all_of_them = {
        name_of(kind, cls): (kind, cls) for kind in CLASSES for cls in mutants.of(kind) if issubclass(cls, Mutant)
    }
    rows = {
        name: row
        for name, row in rows.items()
        if name in all_of_them and row["times"] >= (asked.times or 1 if row["breaks"] in RACES else FEW)
    }
    left = [] if asked.table else [name for name in all_of_them if name not in rows]
    if asked.only:
        left = [name for name in left if {all_of_them[name][1].breaks, all_of_them[name][1].__name__} & {*asked.only}]
    with output.progress("mutants", len(left)) as step:
        for name in left:
            kind, cls = all_of_them[name]
            rows[name] = tried(kind, cls, (asked.times or TIMES) if cls.breaks in RACES else FEW)
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
            step()
    ordered = sorted(rows.values(), key=lambda row: (list(CLASSES).index(row["kind"]), row["breaks"], row["mutant"]))
    RESULTS.with_suffix(".md").write_text(report(ordered))
    missed = [row for row in ordered if row["found"] < ENOUGH * row["times"]]
    for row in missed:
        print(f"{row['mutant']} ({row['breaks']}): found {row['found']} of {row['times']} times")
    print(f"{len(ordered)} mutants of {len(all_of_them)}, {len(missed)} of them found too seldom")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
