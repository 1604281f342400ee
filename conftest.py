"""Reports of a test run: counts that tests leave, and processor time and memory of each test; and a time for its end.

All work under pytest-xdist: a worker attaches them to its reports, the main process collects them.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

_GARBAGE = 10_000, 20, 20
"""Thresholds of the garbage collector. Memory that a test leaves in cycles is looked for after it, see `_Memory`."""
UNTIL = os.environ.get("TEST_UNTIL")  # in seconds, as `date +%s` prints them
COSTS_FILE = os.environ.get("TEST_COSTS_FILE")
# Tensors in tests are small: a second thread of torch's adds two thirds of the processor time, which it spends waiting.
os.environ.setdefault("OMP_NUM_THREADS", "1")


class _Counts:
    """Prints what tests leave in `user_properties`: `("counted", (what, number))` or `("said", line)`."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._said: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for name, value in report.user_properties:
                if name == "counted":
                    what, number = value
                    self._counts[what] += number
                elif name == "said":
                    self._said.append(str(value))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._counts or self._said:
            terminalreporter.section("what was counted")
        for what, number in self._counts.items():
            terminalreporter.write_line(f"{number:>10,}  {what}")
        for line in self._said:
            terminalreporter.write_line(line)


class _Memory:
    """Gives memory back after a test that took much: what engines and tensors leave lies in cycles, and in malloc."""

    _MUCH_BYTES = 32 << 20
    # M_MMAP_THRESHOLD and M_ARENA_MAX of malloc.h. As glibc is, each large buffer that is freed raises the size that it
    # maps alone, until all of them lie in arenas, of which there are 8 a core; these keep what is freed.
    _MALLOC = ((-3, 1 << 20), (-8, 2))

    def __init__(self) -> None:
        self._left = self._bytes()
        libc = ctypes.CDLL(None)
        self._trim = getattr(libc, "malloc_trim", lambda left: None)
        for setting, value in self._MALLOC:
            getattr(libc, "mallopt", lambda what, value: 0)(setting, value)

    @staticmethod
    def _bytes() -> int:
        with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
        return 0

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        if self._bytes() > self._left + self._MUCH_BYTES:
            gc.collect()
            self._trim(0)
            self._left = self._bytes()


class _Costs:
    """Appends a line of JSON for each test to the file that TEST_COSTS_FILE names; scripts/test_costs.py prints them.

    Processor seconds include child processes that ended, and fixtures, which the first test to use one pays for.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._began = 0.0
        self._wall: Counter[str] = Counter()

    @staticmethod
    def _processor_seconds() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._began = self._processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            cost = {
                "test": f"{item.path.relative_to(Path(__file__).parent)}::{item.nodeid.partition('::')[2]}",
                "processor": self._processor_seconds() - self._began,
                "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            }
            report.user_properties.append(("cost", cost))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._wall[report.nodeid] += report.duration  # set-up, call, teardown
        cost = next((value for name, value in report.user_properties if name == "cost"), None)
        if cost is None or "PYTEST_XDIST_WORKER" in os.environ:  # a worker's reports reach the main process too
            return
        line = {**cost, "wall": self._wall.pop(report.nodeid)}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class _Until:
    """Begins no test once TEST_UNTIL has passed, and says how many it left: a run that is cut off says nothing."""

    _REASON = "not begun, because TEST_UNTIL has passed"

    def __init__(self, until: float) -> None:
        self._until = until

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Reported here: the kit takes a requirement that a hook skips for one that failed."""
        if time.time() <= self._until:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        where = str(item.path), 0, self._REASON
        report = pytest.TestReport(item.nodeid, item.location, {}, "skipped", where, "setup")
        item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        skipped = terminalreporter.stats.get("skipped", [])
        left = sum(self._REASON in str(report.longrepr) for report in skipped)
        if left:
            terminalreporter.section(f"{left} tests were {self._REASON}", red=True)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for sockets, whose paths have some 100 bytes at most; those below `tmp_path` may be longer."""
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp" if os.path.isdir("/tmp") else None) as short:
        yield Path(short)


@pytest.fixture
def full_disk() -> Callable[[], AbstractContextManager[None]]:
    """A context in which files can be made and emptied, and not be written to: the system refuses every byte."""

    @contextlib.contextmanager
    def full() -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)

    return full


@pytest.fixture(scope="session")
def for_a_processor(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compile a CUDA source with the C++ compiler, to a library. It is kept until a file beside the source changes."""
    cache = getattr(pytestconfig, "cache", None)
    folder = tmp_path_factory.mktemp("emulated") if cache is None else cache.mkdir("emulated")

    def build(source: Path, *options: str) -> Path:
        compiler = shutil.which("c++") or pytest.skip("no C++ compiler to run the kernels on a processor with")
        command = [compiler, "-std=c++17", "-fPIC", "-shared", *options, "-x", "c++"]
        seen = hashlib.sha256(repr(command).encode())
        seen.update(subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout)
        for path in sorted(source.parent.iterdir()):
            seen.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
        built = folder / f"{source.stem}-{seen.hexdigest()[:32]}.so"
        if not built.exists():
            draft = built.with_suffix(f".{os.getpid()}")  # other workers may build the same
            subprocess.run([*command, source, "-o", draft], check=True)
            draft.rename(built)
        return built

    return build


_FIRST = {
    "test_blend_evals.py",
    "test_command.py",
    "test_exit.py",
    "test_fork.py",
    "test_mutants.py",
    "test_planner_model.py",
    "test_road.py",
    "test_simulation.py",
    "test_soak.py",
}


_ROUNDS = ("B10", "B11", "B20", "B33", "B36", "B56", "C19", "S09")
"""Requirements of the kit that try many times, and whose mutants a quarter of the rounds finds as well."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Components of this repository meet those briefly here, and at length in `make test-full`."""
    of_kit = metafunc.cls is not None and metafunc.function.__module__.startswith("kvloom_testkit.")
    often = of_kit and metafunc.function.__name__.removeprefix("test_").startswith(_ROUNDS)
    if often and metafunc.definition.path.parent.name == "tests" and not hasattr(metafunc.module, "brief"):
        metafunc.fixturenames.append("rounds_of_kit")
        metafunc.parametrize("rounds_of_kit", ["brief", pytest.param("usual", marks=pytest.mark.slow)])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    rounds = getattr(getattr(item, "callspec", None), "params", {}).get("rounds_of_kit")
    if rounds is None:
        return (yield)
    from kvloom_testkit import effort

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(effort, "brief", rounds == "brief")
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Requirements that a class of the kit's names in `slow` are: a variant's, which start a process each.

    A worker begins with files of a few long tests, which at the end would keep one worker busy and the others idle, and
    with those that fork, which costs the more the larger a process has become. Then those of many tests.
    """
    for item in items:
        for requirement in getattr(getattr(item, "cls", None), "slow", ()):
            if item.name.startswith(f"test_{requirement}_"):
                item.add_marker("slow")
    if "PYTEST_XDIST_WORKER" in os.environ:
        tests = Counter(item.path for item in items)
        # Where time may run out, other files come last in each run.
        order = {path: zlib.crc32(f"{UNTIL} {path.name}".encode()) if UNTIL else -tests[path] for path in tests}
        items.sort(key=lambda item: (item.path.name not in _FIRST, order[item.path], item.path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Hardly anything becomes garbage while modules are imported: looking for it is a quarter of the time.

    What was imported stays, and is not looked through again by the tests that look for garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    """Engines of tests are many and small, and what is installed is the same for all of them.

    Garbage of tests is looked for at the size that a process has for much longer work, which is a tenth of the time.
    """
    gc.set_threshold(*_GARBAGE)
    if "kvloom.plugins.registry" in sys.modules:
        from kvloom.plugins import registry

        registry._installed = _read_once(registry._installed)
    if "kvloom.memory.pages" in sys.modules:
        from kvloom.memory import pages

        pages._AHEAD_BYTES = 2 << 20  # it takes memory and time in each of hundreds of engines
    if "typer.main" in sys.modules:
        from typer import main

        main.get_params_from_function = _signed_once(main.get_params_from_function)


def _signed_once(params: Callable[[Callable[..., Any]], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`params`, which evaluates the annotations of a verb's function, of a function that was made again from the same
    code: each run of the command makes all of them."""
    known: dict[object, tuple[object, dict[str, Any]]] = {}

    def remembered(func: Callable[..., Any]) -> dict[str, Any]:
        if not isinstance(func, FunctionType) or hasattr(func, "__wrapped__"):
            return params(func)
        defaults = *(func.__defaults__ or ()), *(func.__kwdefaults__ or {}).items()
        names = tuple(func.__annotations__.items())
        key = func.__code__, id(func.__globals__), tuple(map(repr, defaults)), tuple(map(repr, names))
        if key not in known:
            known[key] = func, params(func)
        return {name: copy.copy(param) for name, param in known[key][1].items()}

    return remembered


def _read_once(installed: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
    """`installed`, which reads files of every distribution, as long as nothing is put into a folder of `sys.path`."""
    known: dict[object, list[Any]] = {}

    def remembered() -> Iterator[Any]:
        places = tuple((place, os.stat(place).st_mtime_ns if os.path.exists(place) else 0) for place in sys.path)
        if places not in known:
            known[places] = list(installed())
        return iter(known[places])

    return remembered


def pytest_configure(config: pytest.Config) -> None:
    # Workers rewrite the same modules and keep them in one cache: one begins at the other end, and finds half of them.
    # Not where tests of one file may be named, which workers must collect in one order.
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579" and not any("::" in each for each in config.args):
        config.args.reverse()
    config.pluginmanager.register(_Counts())
    config.pluginmanager.register(_Memory())
    if UNTIL:
        config.pluginmanager.register(_Until(float(UNTIL)))
    if COSTS_FILE:
        config.pluginmanager.register(_Costs(Path(COSTS_FILE)))
