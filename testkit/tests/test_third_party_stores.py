"""Stores that other people wrote fail what they failed when it was written down, and nothing more."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

EVALS = Path(__file__).resolve().parents[2] / "evals"
KNOWN = {one["type"]: one for one in json.loads((EVALS / "third_party_stores.json").read_text())}
RACES = {"B09", "B10", "B11", "B18", "B33"}
"""Requirements that a store may meet by luck."""


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_a_store_fails_what_it_is_known_to_fail(name: str) -> None:
    known = KNOWN[name]
    if known["distribution"] != "Python":
        try:
            version = metadata.version(known["distribution"])
        except metadata.PackageNotFoundError:
            pytest.skip(f"{known['distribution']} is not installed")
        if version != known["version"]:
            pytest.skip(f"{known['distribution']} {version}, and what is known is of {known['version']}")
    command = [sys.executable, str(EVALS / "third_party_stores.py"), "--check", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    rows = json.loads(next((line for line in done.stdout.splitlines() if line.startswith("[{")), "[]"))
    assert rows, " / ".join(done.stderr.splitlines()[-10:])
    failed, before = ({row["id"] for row in some if row["outcome"] == "not met"} for some in (rows, known["rows"]))
    reasons = [f"{row['id']}: {row['reason']}" for row in rows if row["id"] in failed - before]
    assert failed - RACES == before - RACES and (before or not failed), f"also {reasons}, not {before - failed}"
