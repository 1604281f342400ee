"""The goals for speed, each beside the latest kept run: the table in bench/results/README.md.

python scripts/docs/goals.py writes it anew after a benchmark; a test says when it is old.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parents[2] / "bench" / "results"
PAGE = RESULTS / "README.md"
BEGIN, END = "<!-- goals: made by scripts/docs/goals.py -->", "<!-- end of goals -->"


class Goal(NamedTuple):
    """What a benchmark's rows are to reach."""

    what: str
    file: str
    """Of results, without `.json`."""
    rows: str
    """A pattern that finds them."""
    least: float | None = None
    most: float | None = None
    of: str = ""
    """The limit or peer that the rows are a ratio to; without it the bound is for the measurement itself."""
    unit: str = ""
    limit: str = ""
    """A pattern for the limit, where rows have several."""


GOALS = [
    Goal("keys for a million tokens", "core_path", "keys for a million", least=150, unit=" Mtok/s"),
    Goal("lookup of 16 chunks, all there", "lmcache_peer", "lookup, all hit", least=5, of="LMCache"),
    Goal("lookup, per chunk", "core_path", "lookup, all hit", most=3, unit=" us"),
    Goal("store into memory", "core_path", "store into the memory tier", least=0.90, of="`copy_`"),
    Goal("retrieve from memory", "core_path", "retrieve from the memory tier", least=0.90, of="`copy_`"),
    Goal("512 small chunks from memory", "small_chunks", "memory", least=0.90, of="the copies alone"),
    Goal("open with 8 GiB of memory, and store once", "core_path", "engine open to the end", most=1000, unit=" ms"),
    Goal("disk `auto`: store until written", "lmcache_peer", "disk auto: store", least=1, of="LMCache"),
    Goal("disk `auto`: retrieve again", "lmcache_peer", "disk auto: retrieve again", least=1, of="LMCache"),
    Goal("disk `never`: retrieve again", "lmcache_peer", "disk never: retrieve again", least=1, of="LMCache"),
    Goal("disk `auto`: page cache dropped", "lmcache_peer", "disk auto: retrieve, page", least=1, of="LMCache"),
    Goal("disk: retrieve again", "disk_path", "retrieve again", least=0.90, of="plain calls"),
    Goal("disk: page cache dropped", "disk_path", "page cache dropped", least=0.90, of="plain calls"),
    Goal("disk: reads into the pool", "tiers_path", "read into the pool", least=0.95, of="fio, `readinto`"),
    Goal("512 of 256 KiB from a warm disk", "small_chunks", "disk, native", least=0.85, of="`readv`, hash, copy"),
    Goal(
        "shared memory: retrieve again",
        "shared_memory",
        "retrieve again",
        least=0.80,
        of="memory tier",
        limit="memory tier",
    ),
    Goal("Redis: get and put", "redis_path", "^kvloom: ", least=0.90, of="a raw socket"),
    Goal("Redis: get and put", "lmcache_redis", "LMCache resp", least=1, of="LMCache's `resp`"),
    Goal("Redis: lookup of 512 chunks", "redis_path", "lookup of 512", most=5, unit=" ms"),
    Goal("Mooncake: put and get", "mooncake", "put|read", least=0.95, of="its own client"),
    Goal("Mooncake: lookup of 512 chunks", "mooncake", "lookup of 512", most=5, unit=" ms"),
    Goal("S3: get", "s3", "^get", least=0.95, of="obstore"),
    Goal("S3: put", "s3", "^put", least=0.95, of="obstore"),
    Goal("lookup of 128k tokens", "tiers_path", "lookup of 131,072", most=2, unit=" ms"),
    Goal("memory of a stored chunk's entry", "ledger", "bytes of RSS a row", most=300, unit=" bytes"),
    Goal("a listing read at start", "ledger", "recovery from a listing", least=100, unit=" thousand blobs/s"),
    Goal("vLLM: first token, nothing to hit", "vllm_ttft", "nothing to hit", most=1.01, of="no connector"),
    Goal("vLLM: first token, from memory", "vllm_ttft", "kvloom, memory", most=1.05, of="its own prefix cache"),
    Goal("vLLM: first token, from disk", "vllm_ttft", "kvloom, disk$", most=1.12, of="its own prefix cache"),
    Goal("blending: 15 % computed again", "blend_ttft", "cacheblend 15%$", least=0.88, of="the bound by rows"),
    Goal("observers: more time of a retrieve", "observers", "waited, (prom|open)", most=2, unit=" %"),
    Goal("a million requests replayed, memory and disk", "replay", "64 GiB, disk of 2 TiB", most=60, unit=" s"),
]


class Row(NamedTuple):
    what: str
    measured: float
    ratio: float | None
    limit: str = ""


def rows_of(file: str) -> tuple[str, list[Row]]:
    """The date of a run, and its rows."""
    tree = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
    rows, about = (tree["rows"], tree.get("about", {})) if isinstance(tree, dict) else (tree, {})
    return str(about.get("date", "")), list(_rows(rows))


def _rows(rows: list[dict[str, Any]]) -> Iterator[Row]:
    for row in rows:
        if "verb" in row:
            if row["client"] == "kvloom":
                what = f"{row['verb']} {row.get('MiB', '')} MiB, {row.get('at_once', '')} at once"
                yield Row(what, row["median"], row.get("of_obstore"))
        elif "milliseconds" in row:
            yield Row(row["what"], statistics.median(row["milliseconds"]), None)
        elif "client" in row:
            ours, theirs = statistics.median(row["kvloom"]), statistics.median(row["client"])
            yield Row(row["what"], ours, ours / theirs)
        else:
            percent = re.search(r"([-+]?[\d.]+)%", row["measured"])
            number = percent or re.search(r"([-+]?\d[\d,]*\.?\d*)", row["measured"])
            if number is None:
                continue
            ratio = row.get("of the limit")
            yield Row(
                row["what"].strip(),
                float(number[1].replace(",", "")),
                float(ratio) if ratio else None,
                row.get("limit", ""),
            )


def reached(goal: Goal) -> tuple[str, str, bool]:
    """What was measured, when, and whether all rows reach the goal."""
    date, rows = rows_of(goal.file)
    chosen = [row for row in rows if re.search(goal.rows, row.what) and re.search(goal.limit, row.limit)]
    values = [row.ratio if goal.of else row.measured for row in chosen]
    numbers = sorted(value + 0.0 for value in values if value is not None)
    if not numbers:
        raise SystemExit(f"{goal.file}.json has no row for {goal.rows!r}")
    fine = [
        (goal.least is None or value >= goal.least) and (goal.most is None or value <= goal.most) for value in numbers
    ]
    text = f"{numbers[0]:.3g}" if len(numbers) == 1 else f"{numbers[0]:.3g} to {numbers[-1]:.3g}"
    if len(numbers) > 1 and not all(fine) and any(fine):
        text += f" ({sum(fine)} of {len(fine)} rows)"
    return text, date, all(fine)


def table() -> str:
    lines = ["| | asked | measured | of | reached | run of |", "|---|---|---|---|---|---|"]
    for goal in GOALS:
        text, date, fine = reached(goal)
        bound = f"≥ {goal.least:g}" if goal.least is not None else f"≤ {goal.most:g}"
        source = f"`{goal.file}`" + (f", {date}" if date else "")
        verdict = "yes" if fine else "**no**"
        lines.append(f"| {goal.what} | {bound}{goal.unit} | {text}{goal.unit} | {goal.of} | {verdict} | {source} |")
    return "\n".join(lines)


def page() -> str:
    """bench/results/README.md with the table of now."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
