"""Every change of a reference component is noticed by the kit, but for those of which it is written down why not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EVALS = Path(__file__).resolve().parents[2] / "evals"


@pytest.mark.slow
def test_what_survives_has_a_reason(tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray")
    command = [sys.executable, str(EVALS / "mutated_references.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, " / ".join([*done.stdout.splitlines()[-20:], *done.stderr.splitlines()[-10:]])
