"""The repository itself: its size, its licence, its packages, and nothing in it that belongs to one machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

import kvloom

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(path for path in (ROOT / "plugins").iterdir() if path.is_dir())
PACKAGES = [ROOT / "core", ROOT / "testkit", *PLUGINS]
MAX_TREE_BYTES = 48 * 2**20
MACHINE_PATH = re.compile(r"(?<![\w.~}$/-])/(?:home|Users|root|work|opt|mnt|tmp|private|workspace)/[\w.-]+")
LICENCE_SECTIONS = [
    "Apache License\n                           Version 2.0, January 2004",
    *(f"{number}. {title}" for number, title in enumerate(
        ["Definitions.", "Grant of Copyright License.", "Grant of Patent License.", "Redistribution.",
         "Submission of Contributions.", "Trademarks.", "Disclaimer of Warranty.", "Limitation of Liability.",
         "Accepting Warranty or Additional Liability."], start=1)),
    "END OF TERMS AND CONDITIONS",
]  # fmt: skip


def tracked() -> list[Path]:
    """Every file that git tracks or would track; outside of a clone there is nothing to look at."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        pytest.skip("not a git clone")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def project(package: Path) -> dict[str, Any]:
    return tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_tree_is_small() -> None:
    assert sum(path.stat().st_size for path in tracked()) < MAX_TREE_BYTES


def test_no_path_of_one_machine() -> None:
    found = []
    for path in tracked():
        if path == Path(__file__):
            continue
        with contextlib.suppress(UnicodeDecodeError), path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if MACHINE_PATH.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert found == []


@pytest.mark.parametrize("text", ["see /home/jane/x", 'open("/Users/jane/x")', "cd /mnt/a && ls", "=/tmp/x.txt"])
def test_a_path_of_one_machine_is_seen(text: str) -> None:
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize("text", ["~/home/x", "src/home/x", "https://example.org/home/x", "${HOME}/tmp/x", "/tmp"])
def test_other_paths_are_fine(text: str) -> None:
    assert not MACHINE_PATH.search(text)


def test_licence_is_apache_2_in_full() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    positions = [text.find(section) for section in LICENCE_SECTIONS]
    assert -1 not in positions
    assert positions == sorted(positions)
    assert len(text) > 11_000


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_package_is_complete(package: Path) -> None:
    for name in ("pyproject.toml", "README.md", "src", "tests"):
        assert (package / name).exists(), f"{package.name} has no {name}"
    assert len((package / "README.md").read_text(encoding="utf-8").split()) > 20
    assert list((package / "tests").glob("test_*.py"))
    (imported,) = [path for path in (package / "src").iterdir() if (path / "__init__.py").exists()]
    assert (imported / "py.typed").exists()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_package_metadata(package: Path) -> None:
    data = project(package)
    assert data["version"] == kvloom.__version__
    assert data["license"] == "Apache-2.0"
    assert data["requires-python"] == ">=3.11"
    assert data["readme"] == "README.md"
    line = f"-e {package.relative_to(ROOT)}"
    assert line in (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_plugin_has_one_name_everywhere(plugin: Path) -> None:
    data = project(plugin)
    word, module = plugin.name, f"kvloom_{plugin.name}"
    assert data["name"] == f"kvloom-{word.replace('_', '-')}"
    assert (plugin / "src" / module / "__init__.py").is_file()
    assert data["entry-points"]["kvloom.v1"] == {word: module}
    assert any(re.fullmatch(r"kvloom\s*>=0\.1,\s*<0\.2", need) for need in data["dependencies"])


def test_versions_agree() -> None:
    assert importlib.metadata.version("kvloom") == kvloom.__version__
    assert f"## [{kvloom.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_dependency_is_pinned() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    pinned = {canonical(pin) for pin in pins}
    wanted = set()
    for data in map(project, PACKAGES):
        for needs in [data["dependencies"], *data.get("optional-dependencies", {}).values()]:
            wanted |= {canonical(need) for need in needs}
    tools = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    wanted |= {canonical(line) for line in tools if line and not line.startswith(("#", "-e"))}
    assert {name for name in wanted - pinned if not name.startswith("kvloom")} == set()


def canonical(requirement: str) -> str:
    """The distribution's name in `Some_Dist[extra]>=1`, as indexes compare it."""
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()
