"""The architecture page: the layers of the core as they import each other, and the way of two requests through them."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

import flow

import kvloom

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "kvloom"
_TEXT = 'text-anchor="middle" font-family="sans-serif" font-size="14" fill="#1c2430"'
_PAPER = '<rect width="100%" height="100%" fill="#fff"/>'


def layers() -> list[list[str]]:
    """Packages of core, lowest first: the table that tests/test_layering.py holds the code to."""
    found: list[list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kvloom"]["layers"]
    return found


def imports() -> Counter[tuple[str, str]]:
    """Number of imports between each pair of parts of the core."""
    counted: Counter[tuple[str, str]] = Counter()
    for file in CORE.rglob("*.py"):
        part = file.relative_to(CORE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvloom."):
                counted[part, node.module.split(".")[1]] += 1
            elif isinstance(node, ast.ImportFrom) and node.module == "kvloom":
                for name in node.names:
                    home = {**kvloom._HOME, **kvloom._MODULES}.get(name.name, name.name)
                    counted[part, home.split(".")[0]] += 1
    return counted


def made() -> dict[str, str]:
    ways = {f"{verb}.svg": flow.drawing(verb, calls) for verb, calls in flow.requests().items()}
    return {"architecture.md": PAGE, "layers.svg": drawing(), **ways}


PAGE = """# Architecture

## The way of a request

Drawn from two traced requests: a vertical line is a part of kvloom, an arrow the first call of its kind between two
parts. Dashed calls run on threads of the tier, in parallel. The tiers are memory and a disk with the serializer
`cachegen`; chunks have 32 tokens.

`store` returns once the KV is copied; it is encoded, sealed and written in the background:

![store](store.svg)

`retrieve` with an empty memory tier: blobs are verified while they are read, decoded, and written to the engine's KV in
order; in the end they are in memory too:

![retrieve](retrieve.svg)

A part that hangs or fails ends at its deadline as a miss: [reliability](docs/reliability.md).

## Layers

Imports go one way, from the bottom up, which `tests/test_layering.py` checks. The drawing is made from the code: a box
is a part of `kvloom`, a line stands for the imports between two layers, thicker for more.

![the layers of the core](layers.svg)

Plugins use only the names in `kvloom.__all__` ([public names](reference/api.md)), and so do the core's own plugins in
`builtin`. Decisions are in [design](docs/design/README.md), with their dates.
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
