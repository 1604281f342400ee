"""Run many components against chosen requirements in a pytest session that forks, and say what became of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kvloom_testkit.running import leave_ci

SHARES = 2
"""Run at once, since some components keep others waiting; forked once all are imported, which takes seconds."""
_SECONDS = 900

Wanted = list[tuple[str, str, str, str, list[str], bool]]
"""For each component: label, module, class, kind, ids, and whether it is correct and so tried briefly."""
Settings = dict[str, dict[str, object]]

MODULE = """
import functools, importlib.metadata, json, os
import pytest
from kvloom_testkit import subjects

# Read once and not for each component: it opens a file of every distribution.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)

WANTED = json.loads(os.environ["KIT_WANTED"])


def made(module, name, kind):
    cls = getattr(importlib.import_module(module), name)
    return subjects.Subject(kind, cls.type, cls, json.loads(os.environ["KIT_SETTINGS"]).get(kind, {})).tests()


for label, module, name, kind, *_ in WANTED:
    base = made(module, name, kind)
    globals()[label] = type(label, (base,), {"__module__": __name__})
"""

REPORT = """
import gc, json, os, sys
from kvloom_testkit import effort
from kvloom_testkit.requirements import requirement_id

seen = {}
wanted = {label: (ids, brief) for label, *_, ids, brief in json.loads(os.environ["KIT_WANTED"])}
shares = int(os.environ["KIT_SHARES"])
mine = 0
forks = []


def pytest_pycollect_makeitem(collector, name, obj):
    if collector.name in wanted and requirement_id(name) not in (None, *wanted[collector.name][0]):
        return []  # most of them: none is even made


def pytest_collection_finish(session):
    global mine
    gc.collect()
    gc.freeze()  # else requirements that collect go through all that was imported
    sys.stdout.flush()
    for share in range(1, shares):
        fork = os.fork()
        if fork == 0:
            mine = share
            forks.clear()
            break
        forks.append(fork)
    labels = set(list(wanted)[mine::shares])
    session.items[:] = [item for item in session.items if item.cls.__name__ in labels]


def pytest_runtest_setup(item):
    effort.brief = brief = wanted[item.cls.__name__][1]
    if item.cls.kind == "backend":  # what is right must not fail on a slow machine; mutants keep everybody waiting
        from kvloom_testkit.backends import forms, lifetime, listing, values

        lifetime._SECONDS, listing.SETTLING_SECONDS, values.ANSWER_SECONDS = (5, 6, 10) if brief else (0.3, 1.2, 2)
        forms.ANSWER_SECONDS = values.ANSWER_SECONDS


def pytest_runtest_logreport(report):
    label, name = report.nodeid.split("::")[-2:]
    number = requirement_id(name)
    if report.failed or (report.when == "call" and report.passed) or report.skipped:
        key = f"{label}::{number}"
        if seen.get(key, ["passed"])[0] != "failed":
            seen[key] = [report.outcome, str(report.longrepr)[-1500:] if not report.passed else ""]


def pytest_sessionfinish(session):
    with open(os.path.join(os.environ["KIT_REPORTS"], f"report-{mine}.json"), "w") as file:
        json.dump(seen, file)
    for fork in forks:
        os.waitpid(fork, 0)
"""


def run(where: Path, wanted: Wanted, settings: Settings) -> dict[str, tuple[str, str]]:
    """By `label::id`: outcome and what was said."""
    where.mkdir(parents=True, exist_ok=True)
    (where / "test_wanted.py").write_text(MODULE)
    (where / "conftest.py").write_text(REPORT)
    (where / "pytest.ini").write_text("[pytest]\n")
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # some take long to import
        "KIT_WANTED": json.dumps(wanted),
        "KIT_SETTINGS": json.dumps(settings),
        "KIT_SHARES": str(SHARES),
        "KIT_REPORTS": str(where),
        "PYTEST_DEBUG_TEMPROOT": str(where),
    }
    leave_ci(environment)
    plugins = [each for name in ("no:cacheprovider", "no:logging", "kvloom_testkit") for each in ("-p", name)]
    # Forks would share a file that catches output. A traceback of pytest's own parses the sources of all its frames.
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "--capture=sys", "--tb=native", str(where)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    reports = [where / f"report-{share}.json" for share in range(SHARES)]
    assert all(report.exists() for report in reports), done.stdout + done.stderr
    return {key: tuple(found) for report in reports for key, found in json.loads(report.read_text()).items()}
