"""`kvloom new`: what it writes is listed and meets its requirements as it is; and it writes over nothing."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
import textwrap
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from sessions import Sessions
from typer.testing import CliRunner

from kvloom import ConfigError, EngineConfig
from kvloom.cli.main import app
from kvloom.plugins.kinds import KINDS
from kvloom.plugins.registry import Registry
from kvloom_testkit import effort
from kvloom_testkit.cli import scaffold
from kvloom_testkit.kinds import CLASSES

STARTS = [word for word, start in scaffold.STARTS.items() if start.kind in CLASSES]


@pytest.mark.parametrize(
    "word", [pytest.param(word, marks=[] if word == "observer" else pytest.mark.slow) for word in STARTS]
)
def test_what_is_generated_meets_its_requirements(
    word: str, tmp_path: Path, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = scaffold.create(word, "mine_too", tmp_path)
    monkeypatch.setattr(effort, "brief", True)
    monkeypatch.syspath_prepend(str(place / "src"))
    done = sessions.run(place)
    assert done.returncode == 0, done.stdout[-3000:]
    kind = scaffold.STARTS[word].kind
    registry = Registry.discover(entry_points=[EntryPoint("mine", f"kvloom_{word}_mine_too", "kvloom.v1")])
    assert registry.settings(kind, "mine_too") is registry.get(kind, "mine_too").Config


@pytest.mark.parametrize("word", STARTS)
def test_only_public_names_are_used(word: str, tmp_path: Path) -> None:
    place = scaffold.create(word, "mine_too", tmp_path)
    for file in place.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvloom"):
                home = node.module.partition(".")[0]
                if home in ("kvloom", "kvloom_testkit"):
                    public = importlib.import_module(home).__all__
                    assert node.module == home and {name.name for name in node.names} <= {*public}, file.name


@pytest.mark.parametrize("word", STARTS)
def test_one_class_is_asked_for_and_one_is_there(word: str, tmp_path: Path) -> None:
    place = scaffold.create(word, "mine_too", tmp_path)
    (source,) = place.glob("src/*/mine_too_*.py")
    name = "".join(part.title() for part in source.stem.split("_"))
    contract = pkgutil.resolve_name(KINDS[scaffold.STARTS[word].kind].abc).__name__
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    assert [node.name for node in classes if contract in map(ast.unparse, node.bases)] == [name]


@pytest.mark.parametrize("word", STARTS)
def test_the_configuration_in_its_readme_is_one(word: str, tmp_path: Path) -> None:
    readme = (scaffold.create(word, "mine_too", tmp_path) / "README.md").read_text()
    block = readme.partition("In a configuration:")[2].partition("##")[0]
    (tmp_path / "kvloom.yaml").write_text(textwrap.dedent(block))
    EngineConfig.load(tmp_path / "kvloom.yaml")


@pytest.mark.parametrize("word", STARTS)
def test_it_is_written_as_this_repository_is(word: str, tmp_path: Path) -> None:
    place = scaffold.create(word, "mine_too", tmp_path)
    settings = str(Path(__file__).parents[2] / "pyproject.toml")
    for verb in (["check", "--ignore=I"], ["format", "--check"]):  # what is first-party here is not so for its author
        command = [sys.executable, "-m", "ruff", *verb, "--config", settings, place]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("word", "name", "said"),
    [
        ("backends", "mine", "no kind 'backends'"),
        ("backend", "Mine", "no name for a type"),
        ("backend", "a__b", "no name for a type"),
        ("backend", "class", "no name for a type"),
        ("backend", "null", "no name for a type"),
        ("backend", "a" * 41, "no name for a type"),
        ("backend", "dict", "already"),
    ],
)
def test_what_cannot_be_made_is_said(word: str, name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        scaffold.create(word, name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_no_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--into.*cannot be written"):
        scaffold.create("backend", "mine", tmp_path / "file")


def test_nothing_is_written_over(tmp_path: Path) -> None:
    place = scaffold.create("backend", "mine", tmp_path)
    (place / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        scaffold.create("backend", "mine", tmp_path)
    assert (place / "README.md").read_text() == "mine"


@pytest.mark.parametrize(("word", "type_"), [("backend", "storage"), ("retriever", "blend"), ("executor", "blend")])
def test_a_class_does_not_have_the_name_of_its_base(word: str, type_: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kvloom has a class of this name"):
        scaffold.create(word, type_, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_the_verb_prints_where_the_package_is(tmp_path: Path) -> None:
    done = CliRunner().invoke(app(), ["new", "backend", "mine_too", "--into", str(tmp_path), "--json"])
    place = Path(json.loads(done.stdout)["package"])
    assert place.parent == tmp_path and (place / "pyproject.toml").is_file()
