"""Every YAML and Python block in the documentation works, every link leads somewhere, every name in it exists."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from typer.main import get_group

import kvloom
from kvloom.cli.main import app
from kvloom.config import resolve

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "core/*.md",
        "testkit/*.md",
        "plugins/*/*.md",
        "docs/**/*.md",
        "bench/*.md",
        "evals/**/*.md",
    )
    for path in ROOT.glob(pattern)
)
BLOCK = re.compile(
    r"(?:^<!-- pending: (?P<pending>[^\n]+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    pending: str
    """The reason why it does not work yet; empty if it does."""


def blocks(page: Path, text: str) -> Iterator[Block]:
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("text"))
        yield Block(page, line, match["language"], match["text"], match["pending"] or "")


ALL = [block for page in PAGES for block in blocks(page, page.read_text(encoding="utf-8"))]


def of(language: str) -> list[Block]:
    return [block for block in ALL if block.language == language and not block.pending]


def name(value: Any) -> str:
    page = value.page if isinstance(value, Block) else value
    return f"{page.relative_to(ROOT)}:{value.line}" if isinstance(value, Block) else str(page.relative_to(ROOT))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with what the documentation takes for granted, and a home of its own."""
    for folder in ("evals", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "kvloom.keys").write_text(base64.b64encode(bytes(range(32))).decode())
    return tmp_path


# -- blocks ------------------------------------------------------------------------------------------------------------


def check_yaml(text: str, place: Path) -> None:
    file = place / "block.yaml"
    file.write_text(text, encoding="utf-8")
    config = kvloom.EngineConfig.from_file(file)
    resolve(config, kvloom.Registry.discover(only=config.plugins.only, block=config.plugins.block))


@pytest.mark.parametrize("block", of("yaml"), ids=name)
def test_yaml_block_is_a_configuration(block: Block, place: Path) -> None:
    check_yaml(block.text, place)


# What is imported is LMCache's; plugins/lmcache/tests/test_import.py holds it to the file that it becomes.
OURS = sorted(path for path in (ROOT / "examples").glob("*.yaml") if path.name != "lmcache.yaml")


@pytest.mark.parametrize("example", OURS, ids=name)
def test_example_is_a_configuration(example: Path, place: Path) -> None:
    text = example.read_text(encoding="utf-8")
    if not text.startswith("# pending: "):
        check_yaml(text, place)


def test_the_readme_shows_the_example() -> None:
    shown = [yaml.safe_load(block.text) for block in of("yaml") if block.page == ROOT / "README.md"]
    assert yaml.safe_load((ROOT / "examples/laptop.yaml").read_text(encoding="utf-8")) in shown


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=name)
def test_example_runs_again_and_again(example: Path, place: Path) -> None:
    for _ in range(2):
        done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr


LONG = {
    ROOT / page
    for page in (
        "docs/use/size.md", "docs/use/blend.md", "docs/use/blend-vllm.md", "plugins/connector_transformers/README.md",
    )
}  # fmt: skip
"""Pages whose examples serve for a while, or run a model."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page in LONG else [])
        for page in sorted({block.page for block in of("python")})
    ],
    ids=name,
)
def test_python_blocks_run(page: Path, place: Path) -> None:
    """In order and in one namespace, as somebody who reads along would type them."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in of("python"):
        if block.page == page:
            code = compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True)
            exec(code, namespace)


def test_pending_blocks_are_still_pending(place: Path) -> None:
    """A pending block that works must lose its mark."""
    for block in ALL:
        if block.pending and block.language == "yaml":
            with pytest.raises(kvloom.KVLoomError):
                check_yaml(block.text, place)


def test_blocks_are_found() -> None:
    text = "x\n<!-- pending: no plugin -->\n```yaml\na: 1\n```\n\n```python\nx = 1\n```\n"
    assert [block[1:] for block in blocks(ROOT, text)] == [
        (3, "yaml", "a: 1\n", "no plugin"),
        (7, "python", "x = 1\n", ""),
    ]
    assert len(of("yaml")) >= 2
    assert len(of("python")) >= 3


def test_the_backend_in_the_readme_keeps_kv(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page that plugin authors start from, installed as the plugin that it says it is."""
    (block,) = [block for block in of("python") if block.page.name == "README.md" and "SqliteBackend" in block.text]
    (place / "kvloom_backend_sqlite.py").write_text(block.text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.delitem(sys.modules, "kvloom_backend_sqlite", raising=False)
    entry = EntryPoint("backend_sqlite", "kvloom_backend_sqlite", "kvloom.v1")
    registry = kvloom.Registry.discover(entry_points=[*entry_points(group="kvloom.v1"), entry])
    config = {"chunk_tokens": 4, "tiers": [{"type": "sqlite", "path": "kv.sqlite"}]}
    spec = kvloom.KVSpec("m", num_layers=2, num_kv_heads=2, head_size=4, dtype="float32")
    tokens, kv = torch.arange(12), torch.rand(spec.blob_shape(12))
    with kvloom.Engine.open(config, spec, registry=registry) as engine:
        engine.store(tokens, kv=kv)
        assert engine.flush(30)
    with kvloom.Engine.open(config, spec, registry=registry) as engine:
        again = torch.zeros_like(kv)
        assert engine.retrieve(tokens, kv=again).all()
        assert torch.equal(again, kv)
        engine.clear()
        assert engine.lookup(tokens).tokens == 0


# -- links -------------------------------------------------------------------------------------------------------------


def test_every_verb_is_a_verb() -> None:
    verbs = set(get_group(app()).commands)
    for page in PAGES:
        code = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
        code += [
            line for block in ALL if block.page == page and block.language == "sh" for line in block.text.split("\n")
        ]
        mentioned = {match[1] for text in code if (match := re.match(r"(?:\.venv/bin/)?kvloom ([a-z]+)", text))}
        assert mentioned <= verbs, page.name


def test_links_lead_somewhere() -> None:
    links = [(page, target) for page in PAGES for target in targets(page)]
    assert len(links) > 100 and [(name(page), target) for page, target in links if not leads(page, target)] == []


def targets(page: Path) -> list[str]:
    """The links of a page to others of this repository."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def leads(page: Path, target: str) -> bool:
    """Return whether there is such a file, with such a heading."""
    file, _, anchor = target.partition("#")
    path = (page.parent / file) if file else page
    if not path.exists() or not anchor:
        return path.exists()
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return anchor in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]


# -- coming from LMCache -----------------------------------------------------------------------------------------------

MIGRATION = ROOT / "docs/coming-from-lmcache.md"
ROW = re.compile(r"^\| `(?P<name>[^`]+)` \| (?P<kvloom>.+) \| (?P<status>.+) \|$", re.MULTILINE)
REFERENCE = re.compile(r"`(kvloom[\w.]*(?:\(\w+\))?)`")


def rows() -> list[re.Match[str]]:
    return list(ROW.finditer(MIGRATION.read_text(encoding="utf-8")))


def find(reference: str) -> object:
    """The object that a name such as `kvloom.Engine.lookup(search_range)` refers to: a module, class, member, field or
    parameter."""
    path, _, parameter = reference.rstrip(")").partition("(")
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], start=1):
        fields = {**getattr(found, "model_fields", {}), **getattr(found, "__dataclass_fields__", {})}
        if part in fields:
            found = fields[part]
        elif hasattr(found, part):
            found = getattr(found, part)
        elif inspect.isclass(found) and f"self.{part} =" in inspect.getsource(found):
            found = part
        else:
            found = importlib.import_module(".".join(parts[: index + 1]))
    if parameter and parameter not in inspect.signature(found).parameters:
        raise AttributeError(f"{path} has no parameter {parameter}")
    return found


def test_every_name_has_one_row() -> None:
    listed = (Path(__file__).parent / "seed_names.txt").read_text(encoding="utf-8").splitlines()
    names = [line for line in listed if line and not line.startswith(("#", "["))]
    assert len(names) > 300
    assert sorted(row["name"] for row in rows()) == sorted(names)


def test_every_row_works_or_says_why_it_is_nothing() -> None:
    assert [row["name"] for row in rows() if row["status"] != "works"] == []
    assert [row["name"] for row in rows() if re.match(r"none(?!.*: .*\w)", row["kvloom"])] == []
    table_lines = re.findall(r"^\| `.*$", MIGRATION.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows()) == len(table_lines)


def test_what_works_can_be_imported() -> None:
    references = {row["name"]: REFERENCE.findall(row["kvloom"]) for row in rows() if row["status"] == "works"}
    assert references and [name for name, named in references.items() if not named] == []
    named = {reference for found in references.values() for reference in found}
    wrong = {}
    for reference in sorted(named):
        package = reference.split(".")[0]
        native = (ROOT / "plugins" / package.removeprefix("kvloom_") / "csrc").exists()
        if native and importlib.util.find_spec(package) is None:  # it needs a C++ compiler
            continue
        try:
            find(reference)
        except (AttributeError, ImportError) as error:
            wrong[reference] = str(error)
    assert wrong == {}


@pytest.mark.parametrize(
    "reference",
    ["kvloom.Nothing", "kvloom.Engine.nothing", "kvloom.Engine.lookup(nothing)", "kvloom_nothing", "kvloom.KVSpec.no"],
)
def test_what_does_not_exist_is_noticed(reference: str) -> None:
    with pytest.raises((AttributeError, ImportError)):
        find(reference)
