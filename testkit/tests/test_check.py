"""`kvloom check`: its report, and components that hang, end the process or cannot be opened."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sessions import Done

from kvloom import Config, ConfigError, Event
from kvloom.cli.main import main
from kvloom_testkit import effort, subjects
from kvloom_testkit.cli import check, report
from kvloom_testkit.mutants.observers.calls import ClosesOnce
from kvloom_testkit.reference.backend import DirectoryBackend
from kvloom_testkit.reference.connector import SlotsConnector
from kvloom_testkit.reference.observer import CountingObserver
from kvloom_testkit.subjects import Subject


@pytest.fixture
def kvloom(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command, in this process."""

    def kvloom(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["kvloom", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return kvloom


Run = Callable[..., Done]


def test_a_table_by_requirement(kvloom: Run) -> None:
    done = kvloom("check", "observer", "log")
    assert done.returncode == 0
    assert "O06  ok" in done.stdout and done.stdout.endswith("observer log: 8 met, 0 not met, 0 skipped\n")


def test_the_same_as_json_and_only_some(kvloom: Run) -> None:
    rows = json.loads(kvloom("check", "backend", "dict", "--only", "b01,B21", "--json").stdout)
    assert [(row["id"], row["outcome"]) for row in rows] == [("B01", "met"), ("B21", "skipped")]
    assert rows[1]["reason"] == "DictBackend does not claim persistent"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["backend", "dict", "--only", "B99"], "no requirement B99"),
        (["backend", "dict", "--set", "x"], "expected KEY=VALUE"),
        (["backend", "dict", "--set", "x=1"], "backend dict: x: unknown key"),
        (["backend", "dict", "--set", "path={tmpdir}/kv"], "path: '{tmpdir}/kv' is not YAML"),
        (["backend", "dict", "--seconds", "0"], "expected more than 0"),
        (["backend", "dict", "--seconds", "inf"], "86400 at most"),
        (["backend", "dict", "--set", "x=2024-99-99"], "is not YAML"),
        (["backend", "dict", "--set", "x=" + "[" * 1000], "is not YAML"),
        (["backend", "nope"], "TYPE: no backend of type 'nope'"),
        (["backend", "dict", "--repeat", "0"], "expected at least 1"),
        (["bakend", "dict"], "no kind 'bakend'; there are backend, connector, serializer, tokens, retriever, executor"),
    ],
)
def test_what_cannot_be_checked_is_said(kvloom: Run, arguments: list[str], said: str) -> None:
    done = kvloom("check", *arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_all_that_is_wrong_with_the_settings_is_said() -> None:
    with pytest.raises(ConfigError, match="path: missing; it has no default; pth: unknown key; did you mean 'path'"):
        Subject("backend", "kit_directory", DirectoryBackend, {"pth": "/somewhere"}).config(Path())


def test_who_cannot_be_opened_is_not_tested() -> None:
    with pytest.raises(ConfigError, match="backend kit_directory: could not be opened: NotADirectoryError"):
        check.check(Subject("backend", "kit_directory", DirectoryBackend, {"path": "/dev/null/x"}))


def test_who_hangs_while_opening_is_named() -> None:
    class Hanging(DirectoryBackend):
        def __init__(self, config: Config, spec: object = None) -> None:
            signal.raise_signal(signal.SIGALRM)  # the limit is reached

    first, *others = check.check(Subject("backend", "hanging", Hanging, {"path": "{tmp}"}), seconds=77)
    assert "still not done after 77 s" in first.reason
    assert {row.reason for row in others} == {"Failed: make() does not give a component, as was said"}


class Stuck(CountingObserver):
    def on_event(self, event: Event) -> None:
        os.kill(os.getpid(), signal.SIGALRM)  # the limit is reached
        threading.Event().wait(600)


def test_what_came_in_one_piece_is_not_left_in_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the wrong requirement is said to hang: the one before that which does."""
    messages = [{"begins": "O01"}, {"id": "O01", "outcome": "met", "reason": ""}, {"begins": "O02"}]
    reading, writing = os.pipe()
    os.write(writing, "".join(json.dumps(one) + "\n" for one in messages).encode())
    monkeypatch.setattr(check, "_GRACE_SECONDS", 0.0)
    asked = check._Asked(["O01", "O02"], seconds=0.01, repeat=1, thorough=False)
    session = check._Session(Subject("observer", "kit_counting", CountingObserver), asked)
    rows = list(session._follow(reading))
    os.close(writing)
    session.stop()
    assert [row[:2] for row in rows] == [("O01", "met"), ("O02", "not met")]


def test_after_three_that_hang_the_others_are_not_tried() -> None:
    rows = check.check(Subject("observer", "stuck", Stuck))
    outcomes = [row.outcome for row in rows]
    assert outcomes.count("not met") == 3 and "not tried" in outcomes


class RefusesInCI(CountingObserver):
    def on_event(self, event: Event) -> None:
        if "CI" in os.environ:
            raise OSError("pytest makes a diff of all that it compares here")


def test_there_are_no_long_diffs_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    (row,) = check.check(Subject("observer", "refuses_in_ci", RefusesInCI), only=["O01"])
    assert row.outcome == "met", row.reason


class CannotBeStopped(CountingObserver):
    def on_event(self, event: Event) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        threading.Event().wait(600)


def test_who_cannot_be_interrupted_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_GRACE_SECONDS", 0.0)
    rows = check.check(Subject("observer", "cannot_be_stopped", CannotBeStopped), only=["O01"], seconds=0.05)
    assert [(row.id, row.outcome) for row in rows] == [("O01", "not met")]
    assert "still not done after 0.05 s" in rows[0].reason


class FailsNowAndThen(CountingObserver):
    """Every third that is made."""

    made = 0

    def __init__(self, config: Config, spec: object = None) -> None:
        super().__init__(config)
        FailsNowAndThen.made += 1
        self.number = FailsNowAndThen.made

    def on_event(self, event: Event) -> None:
        if self.number % 3 == 0:
            raise RuntimeError("the third one")


def test_what_fails_now_and_then_is_met_if_it_never_does() -> None:
    failing = check.check(Subject("observer", "fails_now_and_then", FailsNowAndThen), only=["O02"], repeat=9)[0]
    assert failing.outcome == "not met" and failing.reason.endswith("RuntimeError: the third one")
    assert 1 <= int(failing.reason.split(" of 9 times: ")[0]) < 9
    steady = check.check(Subject("observer", "kit_counting", CountingObserver), only=["O02"], repeat=3)
    assert [row.outcome for row in steady] == ["met"]


class FailsWhereverItCan(CountingObserver):
    """Raises on each event, and when it is closed."""

    def on_event(self, event: Event) -> None:
        self.close = self.on_event = self._fail  # type: ignore[method-assign,assignment]
        self._fail()

    def _fail(self, *event: Event) -> None:
        raise RuntimeError("again")


def test_what_fails_twice_in_one_time_counts_once() -> None:
    rows = check.check(Subject("observer", "fails", FailsWhereverItCan), only=["O02"], repeat=3)
    assert rows[0].reason.startswith("3 of 3 times: ")


def test_thorough_is_longer() -> None:
    seen: list[check.Result] = []
    for thorough in (False, True):
        seen += check.check(Subject("observer", "asks", AsksHowLong), only=["O02"], thorough=thorough)
    assert [row.reason for row in seen] == ["RuntimeError: 10", "RuntimeError: 50"]


class AsksHowLong(CountingObserver):
    def on_event(self, event: Event) -> None:
        raise RuntimeError(effort.rounds(10))


class Leaves(CountingObserver):
    """Once."""

    done: Path

    def on_event(self, event: Event) -> None:
        if not self.done.exists():
            self.done.touch()
            os._exit(0)


def test_who_ends_the_process_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leaves, "done", tmp_path / "done", raising=False)
    rows = check.check(Subject("observer", "leaves", Leaves), only=["O01", "O06"])
    assert [row.outcome for row in rows] == ["not met", "met"]
    assert rows[0].reason == "the process ended with status 0"


def test_what_happens_behind_a_test_is_said_once_and_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the test itself has passed, or has hung before."""

    def run_and_leave(*arguments: Any) -> None:
        _run(*arguments)
        os._exit(3)

    _run = check._run
    monkeypatch.setattr(check, "_run", run_and_leave)
    told: list[check.Result] = []
    check.check(Subject("observer", "kit_counting", CountingObserver), only=["O01", "O02"], tell=told.append)
    assert [(row.id, row.outcome, row.reason) for row in told] == [
        ("O01", "met", ""),
        ("O02", "not met", "the process ended with status 3"),
    ]


class Changes(CountingObserver):
    """Once: a later test would not see it."""

    def __init__(self, config: Config, spec: object = None) -> None:
        super().__init__(config)
        torch.set_grad_enabled(False)

    def on_event(self, event: Event) -> None:
        gc.disable()


def test_what_an_earlier_test_changed_does_not_hide_it() -> None:
    rows = check.check(Subject("observer", "changes", Changes))
    assert [row.id for row in rows if row.outcome == "not met"] == ["O08"]
    assert "garbage collection, grad mode of torch" in rows[-1].reason
    assert gc.isenabled() and torch.is_grad_enabled()


def test_results_come_one_by_one_in_the_order_of_their_ids() -> None:
    told: list[check.Result] = []
    rows = check.check(Subject("observer", "kit_counting", CountingObserver), tell=told.append)
    assert [row.id for row in told] == sorted(row.id for row in rows) and set(told) == set(rows)


def test_a_harness_is_looked_for_before_anything_is_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the kit needs a harness: write an entry point"):
        Subject("connector", "bare", SlotsConnector).harness()
    (tmp_path / "lost-1.dist-info").mkdir()
    (tmp_path / "lost-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: lost\nVersion: 1\n")
    entry = "[kvloom.testkit]\nconnector.lost = kvloom_nowhere:harness\n"
    (tmp_path / "lost-1.dist-info" / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="its harness kvloom_nowhere:harness cannot be imported"):
        Subject("connector", "lost", SlotsConnector).harness()


def test_a_requirement_that_is_not_met_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what, why, the usual cause, and what was seen; and the exit status is 1."""
    monkeypatch.setattr(subjects, "choose", lambda *_, **__: [Subject("observer", "once", ClosesOnce)])
    assert report.run("observer", "once", [], [], 60.0, as_json=False) == 1
    said = capsys.readouterr().out
    for expected in (
        "O06  FAIL",
        "Why: an engine that fails",
        "Usually: the second",
        "Here: AttributeError",
        "7 met, 1 not met",
    ):
        assert expected in said


def test_ctrl_c_is_no_failure(tmp_path: Path) -> None:
    program = (
        "import signal, sys, threading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in the background of a shell\n"
        "from kvloom_testkit import subjects\n"
        "from kvloom_testkit.cli import report\n"
        "from kvloom_testkit.reference.observer import CountingObserver\n"
        "class Stuck(CountingObserver):\n"
        "    def on_event(self, event):\n"
        "        open(sys.argv[1], 'w').close()\n"
        "        threading.Event().wait(1000)\n"
        "subjects.choose = lambda *_, **__: [subjects.Subject('observer', 'stuck', Stuck)]\n"
        "sys.exit(report.run('observer', 'stuck', [], ['O06,O02'], 60.0, as_json=False))\n"
    )
    begun = tmp_path / "begun"
    command = [sys.executable, "-c", program, str(begun)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not begun.exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "observer stuck: interrupted" in errors and "FAIL" not in said


def test_of_what_it_printed_the_end_is_read() -> None:
    asked = check._Asked(["O01"], seconds=1.0, repeat=1, thorough=False)
    session = check._Session(Subject("observer", "kit_counting", CountingObserver), asked)
    session._said.truncate(1 << 40)
    session._said.seek(0, os.SEEK_END)
    session._said.write(b"last words")
    assert session._last_words().endswith("last words")
    session.stop()


class FailsAtLength(CountingObserver):
    def on_event(self, event: Event) -> None:
        raise RuntimeError("\x1b[2J" + "x" * 1_000_000)


def test_long_reasons_are_cut_and_do_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    subject = Subject("observer", "fails_at_length", FailsAtLength)
    rows = check.check(subject, only=["O02"])
    assert rows[0].reason.startswith("RuntimeError: \x1b") and len(rows[0].reason) < 5000
    report._explain(subject, rows, rows)
    assert "\x1b" not in capsys.readouterr().out


def test_a_result_that_was_cut_off_is_the_end_of_the_process() -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"begins": "O01"}\n{"id": "O0')
    os.close(writing)
    asked = check._Asked(["O01"], seconds=1.0, repeat=1, thorough=False)
    session = check._Session(Subject("observer", "kit_counting", CountingObserver), asked)
    rows = list(session._follow(reading))
    session.stop()
    assert [row[:2] for row in rows] == [("O01", "not met")] and "the process ended" in rows[0][2]
