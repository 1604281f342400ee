"""`.ci/run`, with a `make` that does nothing; and what `conftest.py` does to a run: its end, and how it collects."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
MAKE = """#!/bin/sh
echo "$1 ${TEST_UNTIL:-}" >>"$SEEN"
[ "$1" != "$FAILS" ] || exit 1
[ "$1" != test-full ] || echo "= 12 tests were not begun, because TEST_UNTIL has passed ="
"""


@pytest.mark.parametrize("fails", ["", "demo", "docs"])
def test_the_slow_tests_come_last_and_have_an_end(tmp_path: Path, fails: str) -> None:
    for name in (".ci/run", "scripts/test_costs.py"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    (programs / "make").write_text(MAKE)
    (programs / "make").chmod(0o755)
    seen = tmp_path / "seen"
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SEEN": str(seen), "FAILS": fails}
    environment.pop("TEST_UNTIL", None)
    done = subprocess.run([tmp_path / ".ci/run"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == (1 if fails else 0), done.stdout + done.stderr
    steps = [line.split() for line in seen.read_text().splitlines()]
    if fails == "demo":
        assert steps == [["demo"]], "without it there is nothing to test with"
        return
    *others, (last, until) = steps
    assert last == "test-full" and len(others) == 7 and all(len(step) == 1 for step in others)
    assert time.time() < float(until) < time.time() + 90 * 60
    assert "ok, 12 tests were not begun" in done.stdout and (f"failed: {fails}" in done.stdout) == bool(fails)


@pytest.fixture(scope="module")
def conftest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("root_conftest", ROOT / "conftest.py")
    assert spec is not None and spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    return conftest


def test_no_test_begins_after_the_end(conftest: ModuleType) -> None:
    reports: list[pytest.TestReport] = []
    hooks = SimpleNamespace(
        pytest_runtest_logstart=lambda **_: None,
        pytest_runtest_logreport=lambda report: reports.append(report),
        pytest_runtest_logfinish=lambda **_: None,
    )
    item = SimpleNamespace(nodeid="test_a.py::test", location=("test_a.py", 0, "test"), path="test_a.py", ihook=hooks)
    assert conftest._Until(time.time() + 60).pytest_runtest_protocol(item) is None and not reports
    assert conftest._Until(time.time() - 1).pytest_runtest_protocol(item) is True
    (report,) = reports
    assert report.skipped and "TEST_UNTIL has passed" in str(report.longrepr)


@pytest.mark.parametrize(("worker", "order"), [("gw0", ["a", "b"]), ("gw1", ["b", "a"]), (None, ["a", "b"])])
def test_every_other_worker_begins_at_the_other_end(
    conftest: ModuleType, monkeypatch: pytest.MonkeyPatch, worker: str | None, order: list[str]
) -> None:
    if worker is None:
        monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    else:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    config = SimpleNamespace(args=["a", "b"], pluginmanager=SimpleNamespace(register=lambda plugin: None))
    conftest.pytest_configure(config)
    assert config.args == order


def test_collection_looks_for_no_garbage(conftest: ModuleType) -> None:
    collecting = conftest.pytest_collection()
    next(collecting)
    during = gc.isenabled()
    collecting.close()
    assert (during, gc.isenabled()) == (False, True)
