"""Gathers the pages of the documentation's site: those that are written, as they lie, and those made from the code.

    python scripts/docs_pages.py FOLDER

FOLDER comes to look like the repository, so that links between pages hold; beside them are `reference/` (the public
names, the verbs, the configuration, each as the code has it), `performance.md` (what bench/results holds) and
`architecture.md` with the layers of the core as they import each other.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvloom

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "src" / "kvloom"
_TEXT = 'text-anchor="middle" font-family="sans-serif" font-size="14" fill="#1c2430"'
_PAPER = '<rect width="100%" height="100%" fill="#fff"/>'
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
VERBS = (
    "plugins", "doctor", "config check", "config show", "config schema", "config import", "plan", "stat", "why",
    "scrub", "warm", "trace record", "trace replay", "top", "serve", "demo", "blend verify", "blend demo", "new",
    "check",
)  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    everything = tracked()
    pages = [path for path in everything if path.suffix == ".md"]
    pictures = {path for path in everything if path.suffix in (".png", ".svg")}
    for file in {*pages, *pictures, *(linked for page in pages for linked in links(page))}:
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, target)
    made = {
        "reference/api.md": api(), "reference/commands.md": commands(), "reference/configuration.md": configuration(),
        "performance.md": performance(), "architecture.md": architecture(),
    }  # fmt: skip
    for name, text in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "layers.svg").write_text(drawing(), encoding="utf-8")
    print(f"{len(pages)} pages gathered, {len(made)} made")


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(line) for line in listed.splitlines()]


def links(page: Path) -> Iterator[Path]:
    """The files of the repository that a page refers to, pages aside."""
    for target in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path = (ROOT / page).parent / target
        if path.is_file() and path.suffix != ".md":
            yield path.resolve().relative_to(ROOT)


# -- reference ---------------------------------------------------------------------------------------------------------


def api() -> str:
    """Each public name, for mkdocstrings to fill in."""
    names = sorted(kvloom._HOME, key=lambda name: (kvloom._HOME[name], name))
    parts = ["# Public names\n", "What `kvloom.__all__` names: plugins and applications use these and nothing else.\n"]
    home = ""
    for name in names:
        if kvloom._HOME[name] != home:
            home = kvloom._HOME[name]
            parts.append(f"## kvloom.{home}\n")
        others = str(getattr(getattr(kvloom, name), "__module__", "kvloom"))
        if not others.startswith("kvloom"):
            parts.append(f"### {name}\n\nFrom {others.partition('.')[0]}.\n")
            continue
        parts.append(f"::: kvloom.{home}.{name}\n    options:\n      heading_level: 3\n      show_root_heading: true\n")
    return "\n".join(parts)


def commands() -> str:
    """What `--help` of each verb says."""
    parts = ["# Commands\n"]
    for verb in VERBS:
        command = [str(Path(sys.executable).with_name("kvloom")), *verb.split(), "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        parts.append(f"## kvloom {verb}\n\n```text\n{done.stdout.strip()}\n```\n")
    return "\n".join(parts)


def configuration() -> str:
    """The keys of every block, as the schema of the plugins of this repository has them."""
    schema = kvloom_schema()
    parts = [
        "# Configuration\n",
        "Every key, made from the models that check them; `kvloom config schema` prints it for editors.\n",
    ]
    parts += block("The file", schema)
    for name, model in sorted(schema.get("$defs", {}).items()):
        if model.get("properties"):
            parts += block(name, model)
    return "\n".join(parts)


def kvloom_schema() -> dict[str, Any]:
    from kvloom.config import json_schema

    return json_schema(kvloom.Registry.discover())


def block(name: str, model: dict[str, Any]) -> list[str]:
    rows = [f"## {name}\n", "| key | default | takes | means |", "|---|---|---|---|"]
    required = set(model.get("required", ()))
    for key, about in model.get("properties", {}).items():
        default = "needed" if key in required else f"`{json.dumps(about.get('default'))}`"
        takes = str(about.get("type") or about.get("const") or ", ".join(map(str, about.get("enum", ()))) or "")
        means = " ".join(str(about.get("description", "")).split())
        rows.append(f"| `{key}` | {cell(default)} | {cell(takes)} | {cell(means)} |")
    return [*rows, ""]


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


# -- performance -------------------------------------------------------------------------------------------------------


def performance() -> str:
    parts = [
        "# Performance\n",
        "What was asked and what came of it is told in [bench/results](bench/results/README.md); what compression and",
        "blending cost in quality in [evals](evals/codec_quality.md), [blending](evals/blend/quality.md). Below are",
        "the rows of each benchmark's latest run that is kept, as it wrote them.\n",
        "![what CacheGen costs](evals/codec_quality.png)\n",
        "![what blending costs](evals/blend/quality.png)\n",
    ]
    for file in sorted((ROOT / "bench" / "results").glob("*.json")):
        tree = json.loads(file.read_text(encoding="utf-8"))
        rows = tree.get("rows") if isinstance(tree, dict) else None
        if not rows or not all("what" in row and "measured" in row for row in rows):
            continue
        about = tree.get("about", {})
        parts += [
            f"## {file.stem}\n",
            f"{about.get('date', '')}, torch {about.get('torch', '')}, {about.get('machine', '')}\n",
        ]
        parts += ["| what | measured | limit | of the limit |", "|---|---|---|---|"]
        for row in rows:
            cells = [str(row[name]) for name in ("what", "measured")]
            cells += [str(row.get(name) or "") for name in ("limit", "of the limit")]
            parts.append(f"| {' | '.join(cell(one) for one in cells)} |")
        parts.append("")
    return "\n".join(parts)


# -- architecture ------------------------------------------------------------------------------------------------------


def layers() -> list[set[str]]:
    """As tests/test_layering.py holds the code to them, lowest first."""
    tree = ast.parse((ROOT / "tests" / "test_layering.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "LAYERS":
            found: list[set[str]] = ast.literal_eval(node.value)
            return found
    raise AssertionError("no LAYERS in tests/test_layering.py")


def imports() -> Counter[tuple[str, str]]:
    """How often each part of the core imports each other one."""
    counted: Counter[tuple[str, str]] = Counter()
    for file in CORE.rglob("*.py"):
        part = file.relative_to(CORE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvloom."):
                counted[part, node.module.split(".")[1]] += 1
            elif isinstance(node, ast.ImportFrom) and node.module == "kvloom":
                for name in node.names:
                    counted[part, kvloom._HOME.get(name.name, name.name).split(".")[0]] += 1
    return counted


def architecture() -> str:
    return """# Architecture

Imports go one way, from the bottom up; `tests/test_layering.py` says so. The drawing is made from the code: a box is a
part of `kvloom`, a line an import from one layer into another, the thicker the more of them.

![the layers of the core](layers.svg)

Plugins stand beside all of this: they use what `kvloom.__all__` names ([public names](reference/api.md)), and
the core's own parts in `builtin` come in by the same door. The way of the data is in the [README](README.md);
decisions have dates in [design](docs/design/README.md); what is held to what, and how it is broken on purpose, is
in [reliability](docs/reliability.md).
"""


def drawing() -> str:
    """An SVG of the layers, lowest at the bottom."""
    wide, high, gap = 150, 34, 30
    rows = [sorted(layer) for layer in layers()]
    most = max(len(row) for row in rows)
    width, height = most * (wide + 12) + 40, len(rows) * (high + gap) + 20
    places: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(reversed(rows)):
        left = (width - len(row) * (wide + 12)) / 2
        for at, part in enumerate(row):
            places[part] = left + at * (wide + 12) + 6, 10 + number * (high + gap)
    lines, boxes = [], []
    for (user, used), count in sorted(imports().items()):
        if user in places and used in places and places[user][1] < places[used][1]:
            (x1, y1), (x2, y2) = places[user], places[used]
            stroke = min(4.0, 0.5 + count / 6)
            lines.append(
                f'<line x1="{x1 + wide / 2:.0f}" y1="{y1 + high:.0f}" x2="{x2 + wide / 2:.0f}" y2="{y2:.0f}" '
                f'stroke="#8a97a6" stroke-opacity="0.45" stroke-width="{stroke:.1f}"/>'
            )
    for part, (x, y) in places.items():
        boxes.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{wide}" height="{high}" rx="6" fill="#eef3f9" stroke="#3b6ea5"/>'
            f'<text x="{x + wide / 2:.0f}" y="{y + 22:.0f}" {_TEXT}>{part}</text>'
        )
    inside = f"<title>kvloom's layers</title>{_PAPER}{''.join(lines)}{''.join(boxes)}"
    view = f"0 0 {width:.0f} {height:.0f}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}" role="img">{inside}</svg>\n'


if __name__ == "__main__":
    main()
