"""Promises of a release: one version everywhere, requirements that admit it, and licences that we accept."""

from __future__ import annotations

import datetime
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import kvloom
from kvloom.plugins.plugin import API

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
PACKAGES = [ROOT / "core", ROOT / "testkit", *PLUGINS]
OURS = re.compile(r"kvloom(?:-[a-z-]+)?(?:\[[a-z,]+\])?\s*(>=\s*\d[\d.]*\s*,\s*<\s*\d[\d.]*)")
ENTRY = re.compile(r"^## \[(?P<version>[^]]+)\] - (?P<date>.+)$", re.MULTILINE)
ROW = re.compile(r"^\| (?P<name>[\w-]+) \| (?P<licence>[^|]+) \| `kvloom", re.MULTILINE)


def project(package: Path) -> dict[str, Any]:
    return tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(package: Path) -> list[Requirement]:
    """Those of a package and of its extras."""
    data = project(package)
    return [*map(Requirement, sum(data.get("optional-dependencies", {}).values(), data["dependencies"]))]


def entries() -> list[tuple[Version, str]]:
    """Version and date of each release in the changelog, as they follow each other there."""
    found = ENTRY.findall((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    return [(Version(version), date) for version, date in found]


# -- extras ------------------------------------------------------------------------------------------------------------


def test_the_extra_all_brings_every_plugin() -> None:
    extras = project(ROOT / "core")["optional-dependencies"]
    assert sorted(Requirement(need).name for need in extras["all"]) == sorted(project(one)["name"] for one in PLUGINS)


# -- versions ----------------------------------------------------------------------------------------------------------


def test_every_package_has_the_version_of_the_newest_entry_in_the_changelog() -> None:
    newest = str(entries()[0][0])
    versions = {package.name: project(package)["version"] for package in PACKAGES}
    assert {**versions, "kvloom.__version__": kvloom.__version__} == dict.fromkeys(
        [*versions, "kvloom.__version__"], newest
    )


def test_changelog_goes_backwards_and_only_what_comes_next_has_no_date() -> None:
    versions = [version for version, _ in entries()]
    assert versions == sorted(set(versions), reverse=True)
    assert len(versions) == (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").count("\n## "), (
        "a heading of another form"
    )
    for index, (_, date) in enumerate(entries()):
        assert (index == 0 and date == "unreleased") or datetime.date.fromisoformat(date.removesuffix(" [YANKED]"))


def ranges() -> Iterator[tuple[str, SpecifierSet]]:
    """Version ranges of our packages that are required by our packages, by `kvloom new`, and by the documentation."""
    for package in PACKAGES:
        for need in requirements(package):
            if need.name.startswith("kvloom"):
                yield package.name, need.specifier
    written = (ROOT / "testkit" / "src" / "kvloom_testkit" / "cli" / "scaffold.py").read_text(encoding="utf-8")
    told = (ROOT / "docs" / "extend" / "versions.md").read_text(encoding="utf-8")
    yield from (("kvloom new", SpecifierSet(found)) for found in OURS.findall(written))
    yield from (("docs/extend/versions.md", SpecifierSet(found)) for found in OURS.findall(told))


def test_requirements_admit_this_version_and_not_the_one_that_may_break_them() -> None:
    """Until 1.0 a minor version may change the interface, then a major one: docs/extend/versions.md."""
    version = Version(kvloom.__version__)
    breaking = Version(f"{version.major + 1}" if version.major else f"0.{version.minor + 1}")
    sources = {source for source, _ in ranges()}
    assert sources >= {*(plugin.name for plugin in PLUGINS), "testkit", "kvloom new", "docs/extend/versions.md"}
    assert [
        f"{source} asks for {asked}, and this is {version}" for source, asked in ranges() if version not in asked
    ] == []
    loose = [f"{source} asks for {asked}: {breaking} may differ" for source, asked in ranges() if breaking in asked]
    assert loose == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_plugins_are_in_the_group_that_this_core_reads(package: Path) -> None:
    groups = [group for group in project(package)["entry-points"] if re.fullmatch(r"kvloom\.v\d+", group)]
    assert API in groups


# -- what is in a package ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_package_says_what_it_is(package: Path) -> None:
    data = project(package)
    assert data["license-files"] == ["LICENSE"]
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert 20 < len(data["description"]) < 120
    assert data["keywords"][0] == "kvloom"
    assert "Programming Language :: Python :: 3.11" in data["classifiers"]
    assert not [one for one in data["classifiers"] if one.startswith("License ::")], "`license` says it"
    native = (package / "csrc").exists()
    assert ("Programming Language :: C++" in data["classifiers"]) == native
    folders = [name for name in ("tests", "tests_vllm") if (package / name).exists()]
    pruned = "".join(f"prune {name}\n" for name in folders)
    assert native or (package / "MANIFEST.in").read_text(encoding="utf-8") == pruned


# -- licences ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def licences() -> Iterator[ModuleType]:
    """scripts/licences.py, which is no module of a package."""
    path = ROOT / "scripts" / "licences.py"
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("_kvloom_licences", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(path.parent))
    sys.modules.pop("wheels", None)


def said(licences: ModuleType, place: Path, *lines: str) -> str:
    """The licence of a package with these lines in its metadata."""
    folder = place / "odd-1.0.dist-info"
    folder.mkdir()
    text = "\n".join(["Metadata-Version: 2.4", "Name: odd", "Version: 1.0", *lines, ""])
    (folder / "METADATA").write_text(text, encoding="utf-8")
    return str(licences.licence(Distribution.at(folder)))


@pytest.mark.parametrize(
    ("lines", "licence"),
    [
        (["License-Expression: MIT OR Apache-2.0", "License: something"], "MIT OR Apache-2.0"),
        (["License: Apache 2.0"], "Apache-2.0"),
        (["License: MPL-2.0 AND MIT"], "MPL-2.0 AND MIT"),
        (["License: as in the file", "Classifier: License :: OSI Approved :: BSD License"], "BSD"),
        (["Classifier: License :: OSI Approved", "Classifier: License :: OSI Approved :: MIT License"], "MIT"),
        (["License: MIT-ish"], ""),
        ([], ""),
    ],
)
def test_what_a_package_says(licences: ModuleType, tmp_path: Path, lines: list[str], licence: str) -> None:
    assert said(licences, tmp_path, *lines) == licence


@pytest.mark.parametrize("licence", ["MIT", "Apache-2.0 OR BSD-3-Clause", "(MIT AND 0BSD) OR ISC", "Apache-2.0, BSD"])
def test_permissive_licences_are_accepted(licences: ModuleType, licence: str) -> None:
    assert list(licences.faults("odd", licence)) == []


@pytest.mark.parametrize(
    ("licence", "why"),
    [
        ("", "does not say"),
        ("GPL-3.0-or-later", "GPL-3.0-or-later"),
        ("MIT AND LGPL-2.1-only", "LGPL-2.1-only"),
        ("MIT OR AGPL-3.0-only", "AGPL-3.0-only"),
        ("GPL-2.0-only WITH Classpath-exception-2.0", "Classpath"),
        ("GNU General Public License v3 (GPLv3)", "GPLv3"),
    ],
)
def test_other_licences_are_refused(licences: ModuleType, licence: str, why: str) -> None:
    faults = list(licences.faults("odd", licence))
    assert faults
    assert why in " ".join(faults)


def test_an_exception_is_for_one_package_and_one_licence(licences: ModuleType) -> None:
    ((name, excepted),) = licences.RULES["excepted"].items()
    assert list(licences.faults(name, excepted["licence"])) == []
    assert list(licences.faults(name, "GPL-3.0-only"))
    assert list(licences.faults("odd", excepted["licence"]))


def test_the_table_has_all_that_packages_ask_for_and_every_row_is_pinned(licences: ModuleType) -> None:
    """The rows themselves are checked where all of it is installed: `make check-wheels`."""
    rows = dict(ROW.findall((ROOT / "docs" / "licences.md").read_text(encoding="utf-8")))
    excluded = {
        canonicalize_name(Requirement(need).name)
        for package in PACKAGES
        for extra, needs in project(package).get("optional-dependencies", {}).items()
        for need in needs
        if extra in licences.EXCLUDED.get(project(package)["name"], {})
    }
    asked = {canonicalize_name(need.name) for package in PACKAGES for need in requirements(package)} - excluded
    assert {name for name in asked - set(rows) if not name.startswith("kvloom")} == set()
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonicalize_name(pin.split("==")[0]) for pin in pins if "==" in pin}
    assert set(rows) - pinned == set()
    assert [fault for name, licence in rows.items() for fault in licences.faults(name, licence)] == []
