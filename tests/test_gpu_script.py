"""scripts/test_gpu.sh on a machine without a GPU: it says what is missing before it compiles for minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(python: str | Path, *parts: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "scripts/test_gpu.sh", str(python), *parts]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_it_names_the_packages_that_are_missing(tmp_path: Path) -> None:
    poor = tmp_path / "python"
    poor.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    poor.chmod(0o755)
    done = run(poor, "build")
    assert done.returncode == 1 and "has no torch, numpy, pydantic, pluggy" in done.stderr, done.stderr
    assert "name it in PYTHONPATH" in done.stderr and not done.stdout


def test_it_names_the_parts_that_there_are() -> None:
    done = run(sys.executable, "nonsense")
    assert done.returncode == 2
    assert done.stdout == "no part nonsense: build, test, memcheck, racecheck, codec, paged\n"


def test_its_tests_are_there() -> None:
    named = [word.strip('"') for word in (ROOT / "scripts/test_gpu.sh").read_text().split() if "/tests/" in word]
    folders = {"$codec": "plugins/serde_cachegen", "$pages": "plugins/connector_vllm", "$blend": "plugins/blend"}
    paths = [word.removeprefix('tests="') for word in named]
    for short, folder in folders.items():
        paths = [path.replace(short, folder) for path in paths]
    assert len(paths) >= 8 and [path for path in paths if not (ROOT / path).is_file()] == []
