"""Prints the report of `kvloom check`: a row for each requirement, then the failed ones and why they matter."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from kvloom import ConfigError, output
from kvloom_testkit import subjects
from kvloom_testkit.cli.check import Result, check
from kvloom_testkit.kinds import conformance_of
from kvloom_testkit.requirements import requirements_of

_MAX_SECONDS = 86_400

_MARKS = {"met": "ok", "not met": "FAIL", "skipped": "-", "not tried": "?"}
INTERRUPTED = 130


def run(
    kind: str, type_: str, settings: Sequence[str], only: Sequence[str], seconds: float, *,
    as_json: bool, repeat: int = 1, thorough: bool = False,
) -> int:  # fmt: skip
    """Check one component and print how it came out; the exit status."""
    (subject,) = subjects.choose([f"{kind}:{type_}"], settings, said_by=("TYPE", "--set"))
    known = {one.id: one.title for one in requirements_of(conformance_of(subject.kind))}
    asked = {each.strip().upper() for text in only for each in text.split(",") if each.strip()}
    wanted = sorted(asked or known)
    if unknown := sorted(set(wanted) - set(known)):
        raise ConfigError("--only", f"no requirement {', '.join(unknown)}; a {subject.kind} has {', '.join(known)}")
    if not 0 < seconds <= _MAX_SECONDS:
        raise ConfigError("--seconds", f"expected more than 0 and {_MAX_SECONDS} at most, not {seconds:g}")
    if repeat < 1:
        raise ConfigError("--repeat", f"expected at least 1, not {repeat}")
    width = max(len(known[each]) for each in wanted)
    with output.progress(f"{subject.kind} {subject.type}", len(wanted)) as step:

        def tell(row: Result) -> None:
            if not as_json:
                why = row.reason if row.outcome == "skipped" else ""
                text = f"{row.id}  {_MARKS[row.outcome]:4}  {row.title:{width}}  {why}".rstrip()
                print(output.plain(text), flush=True)
            step()

        try:
            rows = check(subject, only=wanted, seconds=seconds, tell=tell, repeat=repeat, thorough=thorough)
        except KeyboardInterrupt:
            print(f"{subject.kind} {subject.type}: interrupted", file=sys.stderr)
            return INTERRUPTED
    failed = [row for row in rows if row.outcome == "not met"]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        _explain(subject, rows, failed)
    return 1 if any(row.outcome in ("not met", "not tried") for row in rows) else 0


def _explain(subject: subjects.Subject, rows: Sequence[Result], failed: Sequence[Result]) -> None:
    about = {one.id: one for one in requirements_of(conformance_of(subject.kind))}
    for row in failed:
        one = about[row.id]
        print(f"\n{one.id} {one.what}")
        for name, text in (("Why", one.why), ("Usually", one.usually), ("Here", row.reason)):
            output.say(textwrap.fill(f"{name}: {text[:1000]}", 110, initial_indent="    ", subsequent_indent="    "))
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in _MARKS}
    untried = counts.pop("not tried")
    said = [f"{count} {outcome}" for outcome, count in counts.items()]
    if untried:
        said.append(f"{untried} not tried: {next(row.reason for row in rows if row.outcome == 'not tried')}")
    print(f"\n{subject.kind} {subject.type}: {', '.join(said)}")
