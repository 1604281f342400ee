"""The page for first authors, followed: what it tells to write, in a package that `kvloom new` made, passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sessions import Sessions

from kvloom_testkit import effort
from kvloom_testkit.cli import scaffold

PAGE = Path(__file__).parents[2] / "docs/extend/your-first-backend.md"


@pytest.fixture(autouse=True, params=["brief", pytest.param("usual", marks=pytest.mark.slow)])
def how_long(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Briefly, because what is on the pages is right; and as its readers do."""
    monkeypatch.setattr(effort, "brief", request.param == "brief")


def test_the_first_backend_meets_its_requirements(
    tmp_path: Path, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    backend, tests = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    place = scaffold.create("backend", "sqlite", tmp_path)
    files = [place / "src/kvloom_backend_sqlite/sqlite_backend.py", place / "tests/test_conformance.py"]
    assert all(path.is_file() and str(path.relative_to(place)) in text for path in files)
    assert tests == files[1].read_text().replace("path=tmp_path", 'path=tmp_path / "kv.sqlite"'), "what has changed"
    for path, code in zip(files, (backend, tests), strict=True):
        path.write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(place / "src"))
    done = sessions.run(place)
    assert done.returncode == 0, done.stdout[-3000:]
    counted = re.search(r"# (\d+ passed, \d+ skipped)", text)
    assert counted is not None and counted[1] in done.stdout


def test_the_serializers_of_the_page_meet_their_requirements(
    tmp_path: Path, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.syspath_prepend(str(tmp_path))
    done = sessions.run(tmp_path, "--import-mode=prepend")
    assert done.returncode == 0, done.stdout[-3000:]
