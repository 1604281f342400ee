"""The kit under pytest: `--kvloom backend:disk` tests an installed plugin, and no test of the kit hangs for ever."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from kvloom_testkit import effort

INSTALLED = Path(__file__).with_name("installed.py")
"""The module of tests that `--kvloom` adds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvloom", "kvloom: the conformance of plugins")
    group.addoption("--kvloom", action="append", default=[], metavar="KIND:TYPE",
                    help="hold an installed component to the requirements of its kind, e.g. backend:disk")  # fmt: skip
    group.addoption("--kvloom-set", action="append", default=[], metavar="KEY=VALUE",
                    help="a setting of it, as in YAML; {tmp} stands for a directory of each test's own")  # fmt: skip
    group.addoption("--kvloom-seconds", type=float, default=None, metavar="SECONDS",
                    help="how long one requirement may take before it counts as hanging")  # fmt: skip
    group.addoption("--kvloom-thorough", action="store_true",
                    help="try longer: more rounds of what races, more blobs, more kills")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    # Else an assertion that fails would not say what it has seen. What is imported already would only be warned about.
    modules = {f"{__package__}.{each.stem}" for each in INSTALLED.parent.iterdir() if each.stem != "__init__"}
    pytest.register_assert_rewrite(*sorted(modules - sys.modules.keys()))
    seconds = config.getoption("--kvloom-seconds")
    if seconds is not None and not seconds > 0:
        raise pytest.UsageError(f"--kvloom-seconds: expected more than 0, not {seconds:g}")
    effort.thorough = config.getoption("--kvloom-thorough")
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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A requirement that is skipped on purpose, or excused as one of many, is one left out in silence."""
    for item in filter(_is_requirement, items):
        _check_that_it_is_the_kits(item)
        excuses = list(item.iter_markers_with_node("xfail"))
        if item.get_closest_marker("skip") is not None or item.get_closest_marker("skipif") is not None:
            raise pytest.UsageError(
                f"{item.nodeid} is marked to be skipped; a requirement that is not met is marked "
                "@pytest.mark.xfail(reason=...), and one that does not apply is skipped by the kit"
            )
        if any(node is not item or not mark.kwargs.get("strict") for node, mark in excuses):
            raise pytest.UsageError(
                f"{item.nodeid} is marked xfail from outside; a requirement that is not met is overridden by name in "
                "its class, with @pytest.mark.xfail(reason=...)"
            )


def _check_that_it_is_the_kits(item: pytest.Item) -> None:
    """A mixin, or an assignment behind the class, would have put another one in its place."""
    cls, name = item.cls, item.originalname  # type: ignore[attr-defined]
    ours = [
        vars(base)[name] for base in cls.__mro__ if base.__module__.startswith("kvloom_testkit.") and name in vars(base)
    ]
    if not ours or item.function.__code__ is not ours[-1].__code__:  # type: ignore[attr-defined]
        raise pytest.UsageError(
            f"{item.nodeid} is not the kit's; a requirement may only be overridden in the class itself, to say why it "
            "is not met: @pytest.mark.xfail(reason=...)"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Only the kit says what does not apply; and `make`, or a fixture that it uses, where there is nothing to open."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and _is_requirement(item):
        assert call.excinfo is not None
        trace = [entry for entry in call.excinfo.traceback if "_pytest" not in Path(entry.path).parts]
        by_kit = bool(trace) and Path(trace[-1].path).is_relative_to(INSTALLED.parent)
        makes = _asked_for_by_make(item)
        by_make = any(entry.name in makes or Path(entry.path).name == "conformance.py" for entry in trace)
        if not (by_kit or by_make):
            report.outcome, report.longrepr = "failed", f"skipped from outside of the kit: {call.excinfo.value}"
    return report


def _asked_for_by_make(item: pytest.Item) -> set[str]:
    """The names of `make` and of the fixtures that it needs, such as a server."""
    fixtures = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    found, waiting = set(), ["make"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [asked for one in fixtures.get(name, ()) for asked in one.argnames]
    return found


def _is_requirement(item: pytest.Item) -> bool:
    from kvloom_testkit.requirements import requirement_id

    return _is_ours(item) and requirement_id(item.name) is not None


def _is_ours(item: pytest.Item) -> bool:
    from kvloom_testkit.conformance import Conformance

    cls = getattr(item, "cls", None)
    return cls is not None and issubclass(cls, Conformance)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Opening may hang."""
    with _in_time(item):
        return (yield)


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


def _in_time(item: pytest.Item) -> AbstractContextManager[None]:
    if not _is_ours(item):
        return nullcontext()
    from kvloom_testkit import hanging

    seconds = item.config.getoption("--kvloom-seconds") or hanging.SECONDS

    def hang() -> None:
        pytest.fail(f"{hanging.SAYS} {seconds:g} s", pytrace=True)

    return hanging.in_time(seconds, hang)
