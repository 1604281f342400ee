"""`make test-servers` begins with what is missing, and one command that installs it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts/servers.sh"


def test_the_first_line_names_what_is_missing_and_the_command(tmp_path: Path) -> None:
    for program in ("sort", "tr", "grep"):
        (tmp_path / program).symlink_to(shutil.which(program) or f"/usr/bin/{program}")
    done = subprocess.run(
        [shutil.which("sh") or "/bin/sh", str(SCRIPT), sys.prefix, "check"],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("Not installed: ") and " redis-server " in line
    assert line.endswith(f"are skipped; this installs it: sh scripts/servers.sh {sys.prefix} install")
