"""The kit under pytest: `--kvloom backend:disk` tests what is installed, and no test of the kit hangs for ever."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

INSTALLED = Path(__file__).with_name("installed.py")
"""The module of tests that `--kvloom` adds to what is collected."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvloom", "kvloom: the conformance of plugins")
    group.addoption("--kvloom", action="append", default=[], metavar="KIND:TYPE",
                    help="hold an installed component to the requirements of its kind, e.g. backend:disk")  # fmt: skip
    group.addoption("--kvloom-set", action="append", default=[], metavar="KEY=VALUE",
                    help="a setting of it, as in YAML; {tmp} stands for a directory of each test's own")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--kvloom"):
        from kvloom import KVLoomError
        from kvloom_testkit import subjects

        try:
            subjects.chosen[:] = subjects.choose(config.getoption("--kvloom"), config.getoption("--kvloom-set"))
        except KVLoomError as error:
            raise pytest.UsageError(str(error)) from None
        named = bool(config.invocation_params.args) and config.args_source is pytest.Config.ArgsSource.ARGS
        config.args = [*(config.args if named else []), str(INSTALLED)]


def pytest_report_header(config: pytest.Config) -> str | None:
    subjects = config.getoption("--kvloom")
    return f"kvloom: holding {', '.join(subjects)} to the requirements of its kind" if subjects else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A requirement that is skipped on purpose is one left out in silence."""
    from kvloom_testkit.conformance import Conformance
    from kvloom_testkit.requirements import requirement_id

    for item in items:
        cls = getattr(item, "cls", None)
        is_ours = cls is not None and issubclass(cls, Conformance) and requirement_id(item.name) is not None
        if is_ours and item.get_closest_marker("skip") is not None:
            raise pytest.UsageError(
                f"{item.nodeid} is marked to be skipped; a requirement that is not met is marked "
                "@pytest.mark.xfail(reason=...), and one that does not apply is skipped by the kit"
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A component that hangs fails the requirement that it hangs in."""
    with _in_time(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Closing may hang too."""
    with _in_time(item):
        return (yield)


@contextmanager
def _in_time(item: pytest.Item) -> Iterator[None]:
    from kvloom_testkit.conformance import SECONDS, Conformance

    cls = getattr(item, "cls", None)
    is_ours = cls is not None and issubclass(cls, Conformance)
    if not (is_ours and hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()):
        yield
        return

    def hang(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"still not done after {SECONDS:.0f} s", pytrace=True)

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
