"""Runs the requirements on a connector, in order, and tells of each when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvloom_testkit.engines.bench import Bench, NotApplicableError, NotMetError
from kvloom_testkit.engines.conformance import EngineConformance
from kvloom_testkit.engines.process import EndedError, EngineError, HangError, RefusedError
from kvloom_testkit.requirements import requirements_of

TROUBLES = 3
"""Number of requirements in which the engine hangs or ends, after which the others are not tried."""
REQUIREMENTS = {one.id: one for one in requirements_of(EngineConformance)}
_FIRST = min(REQUIREMENTS)


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one requirement."""

    id: str
    title: str
    outcome: str
    """`met`, `not met`, `skipped`, or `not tried`."""
    reason: str
    seconds: float


def check(bench: Bench, *, only: Sequence[str] = (), tell: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """The rows of a connector. only: ids; default: all. The bench is not closed."""
    tests = EngineConformance()
    wanted = list(only or REQUIREMENTS)
    rows: list[Row] = []
    troubles, refused = 0, ""
    for number in wanted:
        about = REQUIREMENTS[number]
        begin = time.monotonic()
        if refused or troubles >= TROUBLES:
            outcome, reason = "not tried", refused or f"{TROUBLES} hang or end the process"
        else:
            try:
                getattr(tests, about.test)(bench)
                outcome, reason = "met", ""
            except NotApplicableError as error:
                outcome, reason = "skipped", str(error)
            except (NotMetError, EngineError) as error:
                outcome, reason = "not met", str(error).replace(f"{bench.folder}/", "")
                if isinstance(error, RefusedError) and number == _FIRST:
                    refused = "the engine does not start with it"
                troubles += isinstance(error, HangError | EndedError)
                bench.start_over()
        rows.append(Row(number, about.title, outcome, reason, round(time.monotonic() - begin, 3)))
        tell(rows[-1])
    return rows
