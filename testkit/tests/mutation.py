"""Run many components against chosen requirements in a few pytest sessions, and say what became of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SESSIONS = 2
"""At once: some components keep their session waiting, and each takes seconds to start."""
_SECONDS = 900

Wanted = list[tuple[str, str, str, str, list[str], bool]]
"""For each component: label, module, class, kind, ids, and whether it is correct and so tried briefly."""
Settings = dict[str, dict[str, object]]

MODULE = """
import importlib, json, os
import pytest
from kvloom_testkit import subjects

WANTED = json.loads(os.environ["KIT_WANTED"])


def made(module, name, kind):
    cls = getattr(importlib.import_module(module), name)
    return subjects.Subject(kind, cls.type, cls, json.loads(os.environ["KIT_SETTINGS"]).get(kind, {})).tests()


for label, module, name, kind, *_ in WANTED:
    base = made(module, name, kind)
    globals()[label] = type(label, (base,), {"__module__": __name__})
"""

REPORT = """
import gc, json, os
from kvloom_testkit import effort
from kvloom_testkit.requirements import requirement_id

seen = {}
wanted = {label: (ids, brief) for label, *_, ids, brief in json.loads(os.environ["KIT_WANTED"])}


def pytest_pycollect_makeitem(collector, name, obj):
    if collector.name in wanted and requirement_id(name) not in (None, *wanted[collector.name][0]):
        return []  # most of them: none is even made


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # else requirements that collect go through all that was imported


def pytest_runtest_setup(item):
    effort.brief = brief = wanted[item.cls.__name__][1]
    if item.cls.kind == "backend":  # what is right must not fail on a slow machine; mutants keep everybody waiting
        from kvloom_testkit.backends import lifetime, listing

        lifetime._SECONDS, listing.SETTLING_SECONDS = (5, 6) if brief else (0.3, 1.2)


def pytest_runtest_logreport(report):
    label, name = report.nodeid.split("::")[-2:]
    number = requirement_id(name)
    if report.failed or (report.when == "call" and report.passed) or report.skipped:
        key = f"{label}::{number}"
        if seen.get(key, ["passed"])[0] != "failed":
            seen[key] = [report.outcome, str(report.longrepr)[-1500:] if not report.passed else ""]


def pytest_sessionfinish(session):
    with open(os.environ["KIT_REPORT"], "w") as file:
        json.dump(seen, file)
"""


def run(where: Path, wanted: Wanted, settings: Settings) -> dict[str, tuple[str, str]]:
    """By `label::id`: outcome and what was said."""
    shares = [wanted[number::SESSIONS] for number in range(SESSIONS)]
    with ThreadPoolExecutor(SESSIONS) as sessions:
        seen = sessions.map(lambda each: _session(where / str(each[0]), each[1], settings), enumerate(shares))
        return {key: found for one in seen for key, found in one.items()}


def _session(where: Path, wanted: Wanted, settings: Settings) -> dict[str, tuple[str, str]]:
    if not wanted:
        return {}
    where.mkdir(parents=True, exist_ok=True)
    (where / "test_wanted.py").write_text(MODULE)
    (where / "conftest.py").write_text(REPORT)
    (where / "pytest.ini").write_text("[pytest]\n")
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # some take long to import
        "KIT_WANTED": json.dumps(wanted),
        "KIT_SETTINGS": json.dumps(settings),
        "KIT_REPORT": str(where / "report.json"),
    }
    plugins = [each for name in ("no:cacheprovider", "no:logging", "kvloom_testkit") for each in ("-p", name)]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "--tb=short", str(where)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert (where / "report.json").exists(), done.stdout + done.stderr
    seen: dict[str, tuple[str, str]] = json.loads((where / "report.json").read_text())
    return seen
