"""The kit's tests under pytest: tests left out, excuses without a reason, hanging."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from sessions import Done, Sessions

from kvloom_testkit import hanging

HEAD = """
import signal

import pytest
from kvloom import Config, Event
from kvloom_testkit import ObserverConformance
from kvloom_testkit.reference.observer import CountingObserver


class Base(ObserverConformance):
    @pytest.fixture
    def make(self):
        return lambda: CountingObserver(Config())


"""


@pytest.fixture
def run(tmp_path: Path, sessions: Sessions) -> Callable[..., Done]:
    """A session of pytest in this process, on one module of tests."""

    def run(text: str, *arguments: str) -> Done:
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        (tmp_path / "test_mine.py").write_text(HEAD + text)
        return sessions.run(tmp_path, *arguments)

    return run


Run = Callable[..., Done]


def test_a_subclass_runs_them_all(run: Run) -> None:
    done = run("class TestMine(Base):\n    pass\n")
    assert done.returncode == 0 and "8 passed" in done.stdout


@pytest.mark.parametrize(
    "how", ["test_O06_closing_twice_is_fine = None", "def test_O06_closing_twice_is_fine(self): pass"]
)
def test_nothing_is_left_out_in_silence(run: Run, how: str) -> None:
    line = how.format(name="test_O06_closing_twice_is_fine")
    done = run(f"class TestMine(Base):\n    {line}\n")
    assert done.returncode != 0 and "passed" not in done.stdout
    assert "overrides test_O06_closing_twice_is_fine" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "how",
    [
        "class Mixin:\n    def test_O06_closing_twice_is_fine(self): pass\n\n\nclass TestMine(Mixin, Base): pass\n",
        "class TestMine(Base):\n    pass\n\n\nTestMine.test_O06_closing_twice_is_fine = lambda self: None\n",
    ],
)
def test_nothing_takes_the_place_of_a_requirement(run: Run, how: str) -> None:
    done = run(how)
    assert done.returncode != 0 and "is not the kit's" in done.stdout + done.stderr


def test_only_the_kit_and_make_skip(run: Run) -> None:
    skips = "    @pytest.fixture(autouse=True)\n    def later(self):\n        pytest.skip('later')\n"
    done = run(f"class TestMine(Base):\n{skips}")
    assert "8 errors" in done.stdout and "skipped from outside of the kit: later" in done.stdout
    makes = "    @pytest.fixture\n    def make(self):\n        return lambda: pytest.skip('no server')\n"
    assert "8 skipped" in run(f"class TestMine(Base):\n{makes}").stdout


def test_no_class_is_skipped(run: Run) -> None:
    done = run("@pytest.mark.skip(reason='later')\nclass TestMine(Base):\n    pass\n")
    assert done.returncode != 0 and "is marked to be skipped" in done.stdout + done.stderr


ONCE = """
from kvloom_testkit.mutants.observers.calls import ClosesOnce


class Once(ObserverConformance):
    @pytest.fixture
    def make(self):
        return lambda: ClosesOnce(Config())


"""


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("xfail(reason='its library cannot')", "1 xfailed"),
        ("xfail(reason='its library cannot', strict=False)", "1 xfailed"),
        ("xfail(reason='its library cannot', run=False)", "overrides test_O06"),
        ("xfail", "overrides test_O06"),
        ("xfail(reason=' ')", "overrides test_O06"),
        ("skip(reason='no')", "overrides test_O06"),
    ],
)
def test_an_excuse_has_a_reason(run: Run, mark: str, said: str) -> None:
    body = f"    @pytest.mark.{mark}\n    def test_O06_closing_twice_is_fine(self):\n        pass\n"
    done = run(f"{ONCE}class TestMine(Once):\n{body}")
    assert said in done.stdout + done.stderr


def test_an_excuse_that_is_none_any_more_is_a_failure(run: Run) -> None:
    """Whatever its body says: it is the kit's test that runs."""
    mark = "    @pytest.mark.xfail(reason='once', strict=False)\n"
    body = mark + "    def test_O06_closing_twice_is_fine(self): assert False\n"
    done = run(f"class TestMine(Base):\n{body}")
    assert "1 failed" in done.stdout and "XPASS(strict)" in done.stdout


@pytest.mark.parametrize("where", ["class", "module", "hook"])
def test_nothing_is_excused_from_outside(run: Run, tmp_path: Path, where: str) -> None:
    if where == "hook":
        hook = "def pytest_collection_modifyitems(items):\n    [item.add_marker(pytest.mark.xfail) for item in items]\n"
        (tmp_path / "conftest.py").write_text("import pytest\n\n\n" + hook)
    above = {"class": "@pytest.mark.xfail(reason='later', strict=True)\n", "hook": "",
             "module": "pytestmark = pytest.mark.xfail(reason='later', strict=True)\n\n\n"}[where]  # fmt: skip
    done = run(f"{above}class TestMine(Base):\n    pass\n")
    assert done.returncode != 0 and "is marked xfail from outside" in done.stdout + done.stderr


def test_what_requirements_are_built_on_stays(run: Run) -> None:
    body = "    @pytest.fixture\n    def opened(self):\n        return None\n"
    done = run(f"class TestMine(Base):\n{body}")
    assert done.returncode != 0 and "overrides opened" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("lambda: open('/nowhere/at/all')", "could not be opened: FileNotFoundError"),
        ("CountingObserver(Config())", "is to return a function that makes one, not an instance of CountingObserver"),
        ("lambda: None", "make() is to make an instance of Observer, not None"),
        ("lambda one=CountingObserver(Config()): one", "make() returned the same instance twice"),
    ],
)
def test_a_make_that_makes_nothing_is_said_once(run: Run, made: str, said: str) -> None:
    mine = f"    @pytest.fixture\n    def make(self):\n        return {made}\n"
    done = run(f"class TestMine(ObserverConformance):\n{mine}", "-rN")
    assert "8 errors" in done.stdout and said in done.stdout, done.stdout
    assert done.stdout.count("make() does not give a component, as was said") == 7


TIME_IS_UP = "signal.raise_signal(signal.SIGALRM)"
"""Fires the time limit at once, so that no test waits for it."""


@pytest.mark.parametrize("verb", ["on_event", "close"])
def test_who_hangs_fails(run: Run, verb: str) -> None:
    hanging = f"class Hanging(CountingObserver):\n    def {verb}(self, *event):\n        {TIME_IS_UP}\n\n\n"
    mine = "class TestMine(Base):\n    @pytest.fixture\n    def make(self):\n        return lambda: Hanging(Config())\n"
    done = run(hanging + mine, "-k", "O02", "--kvloom-seconds=77")
    assert done.returncode == 1 and "still not done after 77 s" in done.stdout


def test_the_limit_is_one_of_time() -> None:
    class HangError(Exception):
        pass

    def hang() -> None:
        raise HangError

    with pytest.raises(HangError), hanging.in_time(0.01, hang):
        threading.Event().wait(600)


def test_an_installed_component_under_pytest(run: Run) -> None:
    done = run("", "--kvloom", "observer:log", "--kvloom-set", "level=debug")
    assert done.returncode == 0 and "8 passed" in done.stdout, done.stdout
    wrong = run("", "--kvloom", "observer:log", "--kvloom-set", "level=loud")
    assert wrong.returncode == 4 and "observer log: level: should be" in wrong.stderr and "pydantic" not in wrong.stderr
