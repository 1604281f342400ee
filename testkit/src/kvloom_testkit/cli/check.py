"""`kvloom check`: the tests of the kit on one installed component, requirement by requirement."""

from __future__ import annotations

import copy
import gc
import json
import os
import select
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from kvloom import ConfigError
from kvloom_testkit import hanging, subjects
from kvloom_testkit.conformance import CannotOpenError
from kvloom_testkit.kinds import conformance_of
from kvloom_testkit.pytest_plugin import INSTALLED
from kvloom_testkit.requirements import requirement_id, requirements_of
from kvloom_testkit.running import leave_ci

TROUBLES = 3
"""Number of requirements that hang, or end the process, after which the others are skipped."""
_GRACE_SECONDS = 15.0
"""For what hangs where nothing can interrupt it."""
_MOST_CHARACTERS = 4000
"""Of a reason. It is written to a pipe at once, also by a process that ends meanwhile."""
_LAST_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one requirement."""

    id: str
    title: str
    outcome: str
    """`met`, `not met`, `skipped`, or `not tried`."""
    reason: str = ""
    """The reason of a skip, or the error."""


def check(
    subject: subjects.Subject,
    *,
    only: Sequence[str] = (),
    seconds: float = hanging.SECONDS,
    tell: Callable[[Result], None] = lambda result: None,
    repeat: int = 1,
    thorough: bool = False,
) -> list[Result]:
    """Run the tests of a subject's kind, quietly, in a process of their own, which the component may end.

    only: ids of requirements; default: all. seconds: how long one may take. tell: called with each result in turn.
    repeat: how often each is tried; it is met if it is each time. thorough: try longer what fails now and then.
    Raises ConfigError if the component cannot be opened.
    """
    titles = {one.id: one.title for one in requirements_of(conformance_of(subject.kind))}
    found: dict[str, Result] = {}
    troubles = 0
    while left := [each for each in only or titles if each not in found]:
        session = _Session(subject, _Asked(left, seconds, repeat, thorough))
        try:
            for number, outcome, reason in session.results():
                if CannotOpenError.__name__ in reason:
                    problem = reason.partition(f"{CannotOpenError.__name__}: ")[2]
                    raise ConfigError(f"{subject.kind} {subject.type}", problem)
                found[number] = Result(number, titles[number], outcome, reason)
                tell(found[number])
                troubles += hanging.SAYS in reason or reason.startswith(_ENDED)
                if troubles == TROUBLES:
                    break
        finally:
            session.stop()
        if troubles == TROUBLES:
            why = f"{TROUBLES} hang or end the process"
            found |= {each: Result(each, titles[each], "not tried", why) for each in left if each not in found}
    return [found[each] for each in only or titles]


_ENDED = "the process ended"
_Outcome = tuple[str, str, str]
"""Id, outcome, reason."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The component to check, and its options."""

    wanted: Sequence[str]
    seconds: float
    repeat: int
    thorough: bool


class _Session:
    """The tests in a fork of this process; where there are no forks, in this one."""

    def __init__(self, subject: subjects.Subject, asked: _Asked) -> None:
        self._subject, self._asked = subject, asked
        self._wanted, self._seconds = asked.wanted, asked.seconds
        self._child = 0
        self._said = tempfile.TemporaryFile()  # noqa: SIM115

    def results(self) -> Iterator[_Outcome]:
        if not hasattr(os, "fork"):
            told: list[dict[str, Any]] = []
            _run(self._subject, self._asked, told.append)
            yield from ((one["id"], one["outcome"], one["reason"]) for one in told if "id" in one)
            return
        reading, writing = os.pipe()
        self._child = os.fork()
        if not self._child:
            self._be_the_child(reading, writing)
        os.close(writing)
        yield from self._follow(reading)

    def stop(self) -> None:
        """End it, whatever it does."""
        if self._child:
            for kill in (os.killpg, os.kill):  # the second for one that has no group of its own yet
                with suppress(ProcessLookupError, PermissionError):
                    kill(self._child, signal.SIGKILL)
            self._wait()
        self._said.close()

    def _follow(self, reading: int) -> Iterator[_Outcome]:
        current, came = "", set[str]()
        last: _Outcome | None = None  # not said yet: what happens at the end of the process is its test's doing
        with open(reading, "rb", buffering=0) as lines:  # buffered bytes are not ready for `select`
            while True:
                ready, _, _ = select.select([lines], [], [], 2 * self._seconds + _GRACE_SECONDS)
                line = lines.readline() if ready else None
                if not line or not line.endswith(b"\n"):
                    break
                message = json.loads(line)
                current = message.get("begins", current)
                if last is not None:
                    yield last
                    last = None
                if "id" in message:
                    came.add(message["id"])
                    last = message["id"], message["outcome"], message["reason"]
                if "done" in message:
                    yield from ((each, "not met", "the test did not run") for each in self._wanted if each not in came)
                    return
        if line is None:
            yield current or self._wanted[0], "not met", f"{hanging.SAYS} {self._seconds:g} s, and could not be stopped"
            return
        status = self._wait()
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        yield current or self._wanted[0], "not met", f"{_ENDED} {how}: {self._last_words()}".removesuffix(": ")

    def _be_the_child(self, reading: int, writing: int) -> None:
        os.setsid()  # Ctrl-C is for who started the check
        os.close(reading)
        for number in (1, 2):
            os.dup2(self._said.fileno(), number)
        messages = open(writing, "w", encoding="utf-8", buffering=1)  # noqa: SIM115

        def tell(message: dict[str, Any]) -> None:
            messages.write(json.dumps(message) + "\n")

        if "torch" in sys.modules:
            # As kvloom does in a forked process, which would otherwise be taken for the component's doing.
            sys.modules["torch"].set_num_threads(1)
        gc.freeze()  # objects from before the fork are neither collected nor scanned nor copied
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # others' plugins are not needed, and take time to import
        leave_ci(os.environ)
        try:
            _run(self._subject, self._asked, tell)
            tell({"done": True})
        finally:
            os._exit(1)

    def _wait(self) -> int:
        child, self._child = self._child, 0
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 0

    def _last_words(self) -> str:
        self._said.seek(-min(_LAST_BYTES, self._said.seek(0, os.SEEK_END)), os.SEEK_END)
        return self._said.read(_LAST_BYTES).decode(errors="replace").strip()[-500:]


def _run(subject: subjects.Subject, asked: _Asked, tell: Callable[[dict[str, Any]], None]) -> None:
    """One session of pytest; says which test begins, and how each requirement came out."""
    # What is imported before pytest begins could not say what its assertions have seen.
    for name in {cls.__module__ for cls in conformance_of(subject.kind).__mro__}:
        if name != "kvloom_testkit.conformance" and name.startswith("kvloom_testkit.") and not _is_rewritten(name):
            sys.modules.pop(name, None)
    sys.modules.pop("kvloom_testkit.installed", None)  # it has the tests of the subject chosen when it was imported
    subjects.chosen[:] = [subject]
    try:
        settings = str(INSTALLED.with_name("check.ini"))
        quiet = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", "-p", "kvloom_testkit"]
        quiet += ["--tb=short", "-W", "default"]
        limits = [f"--kvloom-seconds={asked.seconds}", "-k", " or ".join(asked.wanted)]
        limits += ["--kvloom-thorough"] * asked.thorough
        where = ["--rootdir", str(INSTALLED.parent), "-c", settings, str(INSTALLED)]
        pytest.main([*quiet, *limits, *where], plugins=[_Outcomes(tell, asked.repeat), _Silent()])
    finally:
        subjects.chosen.clear()


def _is_rewritten(module: str) -> bool:
    """By pytest, which has begun already where its tests ask for a check."""
    return hasattr(sys.modules.get(module), "@pytest_ar")


class _Outcomes:
    """A pytest plugin that puts the tests in the order of their ids, and says what became of each requirement."""

    def __init__(self, tell: Callable[[dict[str, Any]], None], repeat: int = 1) -> None:
        self._tell, self._repeat = tell, repeat
        self._failed: Counter[str] = Counter()
        self._fails = False
        self._left: Counter[str] = Counter()
        self._outcomes: dict[str, tuple[str, str]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # Copies: between two times of one and the same, pytest would keep its fixtures.
        items.extend([_once_more(item) for item in items for _ in range(1, self._repeat)])
        items.sort(key=lambda item: requirement_id(item.name) or "")
        self._left = Counter(requirement_id(item.name) or "" for item in items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell({"begins": _number(nodeid)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        number = _number(report.nodeid)
        if report.passed and report.when != "call":
            return
        before = self._outcomes.get(number, ("", ""))[0]
        self._fails |= report.failed
        if report.failed and before != "not met":
            crash = getattr(report.longrepr, "reprcrash", None)
            said = str(crash.message if crash is not None else report.longrepr)
            self._outcomes[number] = "not met", said[:_MOST_CHARACTERS]
        elif report.skipped and not before:
            said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._outcomes[number] = "skipped", said.removeprefix("Skipped: ")[:_MOST_CHARACTERS]
        elif report.passed and before in ("", "skipped"):
            self._outcomes[number] = "met", ""

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        number = _number(nodeid)
        self._left[number] -= 1
        self._failed[number] += self._fails  # once, though closing fails too
        self._fails = False
        if not self._left[number] and number in self._outcomes:
            outcome, reason = self._outcomes[number]
            if self._repeat > 1 and outcome == "not met":
                reason = f"{self._failed[number]} of {self._repeat} times: {reason}"
            self._tell(asdict(Result(number, "", outcome, reason)))


def _once_more(item: pytest.Item) -> pytest.Item:
    another = copy.copy(item)
    another._initrequest()  # type: ignore[attr-defined]
    return another


def _number(nodeid: str) -> str:
    return requirement_id(nodeid.rsplit("::", 1)[-1]) or ""


class _Silent:
    """Keeps pytest's own report off the terminal."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            config.pluginmanager.unregister(reporter)
