"""The page for first authors, followed: what it tells to write, in a package that `kvloom new` made, passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from kvloom_testkit import scaffold

PAGE = Path(__file__).parents[2] / "docs/extend/your-first-backend.md"


def test_the_first_backend_meets_its_requirements(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    backend, tests = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    place = scaffold.create("backend", "sqlite", tmp_path)
    files = [place / "src/kvloom_backend_sqlite/sqlite_backend.py", place / "tests/test_conformance.py"]
    assert all(path.is_file() and str(path.relative_to(place)) in text for path in files)
    assert tests == files[1].read_text().replace("path=tmp_path", 'path=tmp_path / "kv.sqlite"'), "what has changed"
    for path, code in zip(files, (backend, tests), strict=True):
        path.write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place / "src"), *sys.path])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(place)]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    counted = re.search(r"# (\d+ passed, \d+ skipped)", text)
    assert counted is not None and counted[1] in done.stdout


def test_the_serializers_of_the_page_meet_their_requirements(tmp_path: Path) -> None:
    text = PAGE.with_name("your-first-serializer.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    code = "\n\n".join(block.split("\n\n\nlayered = ")[0] for block in blocks if "class " in block)
    tests = (
        "\n\nfrom kvloom_testkit.subjects import Subject\n\n"
        "TestZlib = Subject('serializer', 'zlib', ZlibSerializer).tests()\n"
        "TestLayersOfZlib = Subject('serializer', 'zlib_layers', LayersOfZlib).tests()\n"
    )
    (tmp_path / "test_page.py").write_text(code + tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
