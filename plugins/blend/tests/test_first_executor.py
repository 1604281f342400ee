"""The page for authors of executors, followed: what it tells to write, in a package that `kvloom new` made, passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from kvloom_testkit.cli import scaffold

PAGE = Path(__file__).parents[3] / "docs/extend/your-first-executor.md"


def test_the_first_executor_meets_its_requirements(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    code, _ = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    place = scaffold.create("executor", "edges", tmp_path)
    source = place / "src/kvloom_executor_edges/edges_executor.py"
    assert source.is_file() and str(source.relative_to(place)) in text
    source.write_text(code, encoding="utf-8")
    ((group, name, module),) = re.findall(r'^\[project\.entry-points\."(.+)"\]\n(\w+) = "(\w+)"$', text, re.MULTILINE)
    assert f'"{group}"]\n{name} = "{module}"\n' in (place / "pyproject.toml").read_text()
    installed = place / "src" / "kvloom_executor_edges-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: kvloom-executor-edges\nVersion: 0.1.0\n")
    (installed / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place / "src"), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from kvloom.cli.main import main; main()", "check", "executor", "edges"]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    counted = re.search(r"# (\d+) requirements", text)
    assert counted is not None and len(re.findall(r"^X\d\d  ", done.stdout, re.MULTILINE)) == int(counted[1])
