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

Wanted = list[tuple[str, str, str, str, list[str] | None]]
"""Of each component: label, module, class, kind, ids (None: all)."""
Settings = dict[str, dict[str, object]]

MODULE = '''
import importlib, json, os
import pytest
from kvloom_testkit import subjects

WANTED = json.loads(os.environ["KIT_WANTED"])
"""[name of the test class, module, class, kind, ids or None for all]"""


def made(module, name, kind):
    cls = getattr(importlib.import_module(module), name)
    return subjects.Subject(kind, cls.type, cls, json.loads(os.environ["KIT_SETTINGS"]).get(kind, {})).tests()


for label, module, name, kind, ids in WANTED:
    base = made(module, name, kind)
    globals()[label] = type(label, (base,), {"__module__": __name__})
'''

REPORT = """
import json, os
from kvloom_testkit import effort
from kvloom_testkit.requirements import requirement_id

seen = {}
wanted = {label: ids for label, *_, ids in json.loads(os.environ["KIT_WANTED"])}


def pytest_collection_modifyitems(items):
    def is_wanted(item):
        ids = wanted[item.cls.__name__]
        return ids is None or requirement_id(item.name) in ids

    items[:] = filter(is_wanted, items)


def pytest_runtest_setup(item):
    effort.brief = wanted[item.cls.__name__] is None


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
        "KIT_WANTED": json.dumps(wanted),
        "KIT_SETTINGS": json.dumps(settings),
        "KIT_REPORT": str(where / "report.json"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", str(where)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert (where / "report.json").exists(), done.stdout + done.stderr
    seen: dict[str, tuple[str, str]] = json.loads((where / "report.json").read_text())
    return seen
