"""Runs the requirements on a subject, in order, and tells of each when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvloom_testkit.engines.base import BaseBench, NotApplicableError, NotMetError
from kvloom_testkit.engines.process import EndedError, EngineError, HangError, RefusedError
from kvloom_testkit.engines.requirements import EngineConformance
from kvloom_testkit.requirements import requirements_of

TROUBLES = 3
"""Number of requirements in which the engine hangs or ends, after which the others are not tried."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one requirement."""

    id: str
    title: str
    outcome: str
    """`met`, `not met`, `skipped`, or `not tried`."""
    reason: str
    """Why; of what is met, a measurement or nothing."""
    seconds: float


def check(
    bench: BaseBench, conformance: type[Any] = EngineConformance, *, only: Sequence[str] = (), repeat: int = 1,
    tell: Callable[[Row], None] = lambda row: None,
) -> list[Row]:  # fmt: skip
    """The rows of a subject. The bench is not closed.

    only: ids; default: all of the conformance class. repeat: how often each is tried, each time in a new session with
    an empty store; it is met if it is each time.
    """
    tests = conformance()
    requirements = {one.id: one for one in requirements_of(conformance)}
    rows: list[Row] = []
    troubles, refused = 0, ""
    for number in only or requirements:
        about = requirements[number]
        begin = time.monotonic()
        failures: list[str] = []
        outcome, reason, times = "not tried", refused or f"{TROUBLES} hang or end the process", 0
        while times < repeat and not refused and troubles < TROUBLES and outcome != "skipped":
            if times:
                bench.start_over()
            times += 1
            try:
                outcome, reason = "met", getattr(tests, about.test)(bench) or ""
            except NotApplicableError as error:
                outcome, reason = "skipped", str(error)
            except (NotMetError, EngineError) as error:
                failures.append(str(error).replace(f"{bench.folder}/", ""))
                stopped = isinstance(error, HangError | EndedError)
                if (stopped or isinstance(error, RefusedError)) and number == min(requirements):
                    refused = "the engine does not start with it, or not for long"
                troubles += stopped
        if failures:
            counted = f"{len(failures)} of {times} times: " if repeat > 1 else ""
            outcome, reason = "not met", counted + failures[0]
            bench.start_over()
        rows.append(Row(number, about.title, outcome, reason, round(time.monotonic() - begin, 3)))
        tell(rows[-1])
    return rows
