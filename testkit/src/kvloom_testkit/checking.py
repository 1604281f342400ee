"""`kvloom check`: the tests of the kit on one installed component, as a table by requirement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kvloom_testkit import subjects
from kvloom_testkit.kinds import conformance_of
from kvloom_testkit.pytest_plugin import INSTALLED
from kvloom_testkit.requirements import requirement_id, requirements_of


@dataclass(frozen=True, slots=True)
class Result:
    """How one requirement came out."""

    id: str
    title: str
    outcome: str
    """`met`, `not met`, or `skipped`."""
    reason: str = ""
    """Of a skip, or the error."""


class Outcomes:
    """A pytest plugin that remembers what became of each requirement."""

    def __init__(self) -> None:
        self.by_id: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rsplit("::", 1)[-1]
        number = requirement_id(name)
        if number is None or (report.passed and report.when != "call") or self.by_id.get(number, ("",))[0] == "not met":
            return
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.by_id[number] = ("not met", str(crash.message if crash is not None else report.longrepr))
        elif report.skipped:
            said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.by_id[number] = ("skipped", said.removeprefix("Skipped: "))
        else:
            self.by_id.setdefault(number, ("met", ""))


def check(subject: subjects.Subject, *, arguments: Sequence[str] = ()) -> list[Result]:
    """Run the tests of a subject's kind in this process, quietly. arguments: more of them for pytest."""
    outcomes = Outcomes()
    subjects.chosen[:] = [subject]
    try:
        settings = str(INSTALLED.with_name("check.ini"))
        quiet = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", "--tb=short", "-W", "default"]
        where = ["--rootdir", str(INSTALLED.parent), "-c", settings, str(INSTALLED)]
        pytest.main([*quiet, *arguments, *where], plugins=[outcomes, _Silent()])
    finally:
        subjects.chosen.clear()
    rows = []
    for one in requirements_of(conformance_of(subject.kind)):
        outcome, reason = outcomes.by_id.get(one.id, ("not met", "the test did not run"))
        rows.append(Result(one.id, one.title, outcome, reason))
    return rows


class _Silent:
    """Keeps pytest's own report off the terminal."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            config.pluginmanager.unregister(reporter)
