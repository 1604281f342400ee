"""`kvloom check`: the tests of the kit on one installed component, requirement by requirement."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvloom import ConfigError
from kvloom_testkit import hanging, subjects
from kvloom_testkit.conformance import CannotOpenError, opens
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
    """A pytest plugin that puts the tests in the order of their ids, and says what became of each requirement."""

    def __init__(self, titles: dict[str, str], tell: Callable[[Result], None]) -> None:
        self.by_id: dict[str, Result] = {}
        self._titles = titles
        self._tell = tell
        self._left: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: requirement_id(item.name) or "")
        self._left = Counter(requirement_id(item.name) or "" for item in items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        number = requirement_id(report.nodeid.rsplit("::", 1)[-1])
        if number is None or (report.passed and report.when != "call"):
            return
        before = self.by_id.get(number)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._came_out(number, "not met", str(crash.message if crash is not None else report.longrepr))
        elif before is None and report.skipped:
            said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._came_out(number, "skipped", said.removeprefix("Skipped: "))
        elif before is None or before.outcome == "skipped":
            self._came_out(number, "met")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        number = requirement_id(nodeid.rsplit("::", 1)[-1]) or ""
        self._left[number] -= 1
        if not self._left[number] and number in self.by_id:
            self._tell(self.by_id[number])

    def _came_out(self, number: str, outcome: str, reason: str = "") -> None:
        if number not in self.by_id or self.by_id[number].outcome != "not met":
            self.by_id[number] = Result(number, self._titles[number], outcome, reason)


def check(
    subject: subjects.Subject,
    *,
    only: Sequence[str] = (),
    seconds: float = hanging.SECONDS,
    tell: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run the tests of a subject's kind in this process, quietly.

    only: ids of requirements; default: all. seconds: how long one may take. tell: called with each result in turn.
    Raises ConfigError if the component cannot be opened.
    """
    _try_to_open(subject, seconds)
    known = {one.id: one.title for one in requirements_of(conformance_of(subject.kind))}
    outcomes = Outcomes(known, tell)
    subjects.chosen[:] = [subject]
    try:
        settings = str(INSTALLED.with_name("check.ini"))
        quiet = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", "--tb=short", "-W", "default"]
        limits = [f"--kvloom-seconds={seconds}", *(["-k", " or ".join(only)] if only else [])]
        where = ["--rootdir", str(INSTALLED.parent), "-c", settings, str(INSTALLED)]
        pytest.main([*quiet, *limits, *where], plugins=[outcomes, _Silent()])
    finally:
        subjects.chosen.clear()
    for each in only or known:
        if each not in outcomes.by_id:
            outcomes.by_id[each] = Result(each, known[each], "not met", "the test did not run")
            tell(outcomes.by_id[each])
    return [outcomes.by_id[each] for each in only or known]


def _try_to_open(subject: subjects.Subject, seconds: float) -> None:
    def hang() -> None:
        raise CannotOpenError(f"could not be opened in {seconds:g} s")

    with tempfile.TemporaryDirectory() as directory:
        try:
            with hanging.in_time(seconds, hang):
                opens(lambda: subject.make(Path(directory)), conformance_of(subject.kind))
        except CannotOpenError as error:
            raise ConfigError(f"{subject.kind} {subject.type}", str(error)) from error


class _Silent:
    """Keeps pytest's own report off the terminal."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            config.pluginmanager.unregister(reporter)
