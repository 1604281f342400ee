"""The performance page: each benchmark's latest run that is kept, as a chart where there is one, and its rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PAGE = """# Performance

[bench/results](bench/results/README.md) has the goals and results. [Compression](evals/codec_quality.md) and
[blending](evals/blend/quality.md) have measurements of quality. Below are the rows of each benchmark's latest stored
run. A bar that ends at the line is as fast as the limit, or the peer, measured in the same run; a longer one is faster.

![loss from CacheGen](evals/codec_quality.png)
![loss from blending](evals/blend/quality.png)
"""


class Bar(NamedTuple):
    label: str
    value: float
    text: str


class Chart(NamedTuple):
    """title: what a bar's length means. line: where the mark stands, if there is one."""

    title: str
    bars: Callable[[Sequence[Mapping[str, Any]]], list[Bar]]
    line: float | None = None


def of_limit(rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Bars for the rows that have a limit."""
    bars = []
    for row in rows:
        try:
            bars.append(
                Bar(str(row["what"]).strip(), float(row["of the limit"]), f"{row['of the limit']}  ({row['measured']})")
            )
        except (KeyError, ValueError):
            continue
    return bars


def numbers(unit: str) -> Callable[[Sequence[Mapping[str, Any]]], list[Bar]]:
    """Bars for the rows with a measurement in `unit`: the first number before it."""

    def bars(rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
        found = []
        for row in rows:
            match = re.search(rf"([-+]?\d+(?:\.\d+)?) ?{re.escape(unit)}", str(row["measured"]))
            if match:
                found.append(Bar(str(row["what"]).strip(), float(match[1]), str(row["measured"])))
        return found

    return bars


CHARTS = {
    "vllm_ttft": Chart("milliseconds to the first token: shorter is better", numbers("ms")),
    "blend_ttft": Chart("times as fast as a whole prefill", numbers("x"), 1.0),
    "observers": Chart("percent more than without an observer", numbers("%")),
    "replay": Chart("seconds for a million requests of 16 blocks", numbers("")),
}
RATIO = Chart("of the limit, or of the peer, in the same run", of_limit, 1.0)
MOST_BARS = 36


def made() -> dict[str, str]:
    parts, charts = [PAGE], {}
    for file in sorted(RESULTS.glob("*.json")):
        tree = json.loads(file.read_text(encoding="utf-8"))
        rows = tree.get("rows") if isinstance(tree, dict) else None
        if not rows or not all("what" in row and "measured" in row for row in rows):
            continue
        about = tree.get("about", {})
        said = ", ".join(f"{key} {about[key]}" for key in ("date", "torch", "machine") if about.get(key))
        parts.append(f"## {file.stem}\n\n{said}\n")
        chart = CHARTS.get(file.stem, RATIO)
        bars = chart.bars(rows)[:MOST_BARS]
        if len(bars) > 1:
            charts[f"charts/{file.stem}.svg"] = drawing(chart, bars)
            parts.append(f"![{file.stem}: {chart.title}](charts/{file.stem}.svg)\n")
        parts.append(table(rows))
    return {"performance.md": "\n".join(parts), **charts}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| what | measured | limit | of the limit |", "|---|---|---|---|"]
    for row in rows:
        cells = [str(row[name]) for name in ("what", "measured")]
        cells += [str(row.get(name) or "") for name in ("limit", "of the limit")]
        lines.append(f"| {' | '.join(escaped(one) for one in cells)} |")
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


HIGH, LABELS, WIDE, TEXTS = 22, 420, 360, 250


def drawing(chart: Chart, bars: Sequence[Bar]) -> str:
    """An SVG of bars, one below the other, each with what was measured behind it."""
    most = max([*(bar.value for bar in bars), chart.line or 0.0, 1e-9])
    least = min([*(bar.value for bar in bars), 0.0])
    scale = WIDE / (most - least)
    zero = LABELS - least * scale
    width, height = LABELS + WIDE + TEXTS, HIGH * (len(bars) + 2)
    inside = [
        f"<title>{escaped(chart.title)}</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{LABELS}" y="17" {_TEXT} font-size="13" font-weight="bold">{escaped(chart.title)}</text>',
    ]
    for number, bar in enumerate(bars):
        y = HIGH * (number + 1) + 6
        left, length = min(zero, zero + bar.value * scale), max(abs(bar.value) * scale, 1.0)
        label = escaped(cut(bar.label))
        inside.append(
            f'<text x="{LABELS - 8}" y="{y + 12}" text-anchor="end" {_TEXT} font-size="12">{label}</text>'
            f'<rect x="{left:.1f}" y="{y}" width="{length:.1f}" height="{HIGH - 6}" fill="#3b6ea5" fill-opacity="0.8"/>'
            f'<text x="{left + length + 6:.1f}" y="{y + 12}" {_TEXT} font-size="11">{escaped(cut(bar.text, 44))}</text>'
        )
    if chart.line is not None:
        x = zero + chart.line * scale
        inside.append(f'<line x1="{x:.1f}" y1="{HIGH}" x2="{x:.1f}" y2="{height - 10}" stroke="#b5482f"/>')
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return f"{svg}{''.join(inside)}</svg>\n"


def cut(text: str, most: int = 64) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


_TEXT = 'font-family="sans-serif" fill="#1c2430"'
