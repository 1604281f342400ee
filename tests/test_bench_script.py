"""`make bench`: what cannot run here is skipped by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_scripts_that_lack_a_module_are_skipped_and_one_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    texts = {
        "lacking": "import json, nosuchmodule.inner",
        "failing": "raise SystemExit(3)",
        "table": "",
        "running": "from table import __name__ as name\nprint('ran beside', name)",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    names = [f"{tmp_path}/{name}.py" for name in texts if name != "table"]
    command = [sys.executable, ROOT / "scripts/bench.py", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "ran beside table" in done.stdout
    lines = done.stderr.splitlines()
    assert lines == [f"skipped: {names[0]} (needs nosuchmodule)", f"failed: {names[1]}"]
