"""Prints the demo's results: a table, a chart, and checks of its claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloom import replace_file

if TYPE_CHECKING:
    from rich.console import Console

_NOISE = 4
"""Maximum distance from the cold run, relative to that of another split: maxima of rounding noise differ by less than
this."""


@dataclass(frozen=True, slots=True)
class Check:
    """One claim, and whether it holds."""

    holds: bool
    text: str


def checks(result: Mapping[str, Any]) -> list[Check]:
    """The demo fails if one of them does not hold."""
    report = result["report"]
    tolerance = max(_NOISE * result["split_difference"], _NOISE * result["resolution"])
    return [
        Check(
            report["hit_tokens"] > 0, f"the second process found {report['hit_tokens']:,} tokens that the first stored"
        ),
        _as_it_was(result),
        Check(
            result["cold_difference"] <= tolerance,
            f"logits are within {tolerance:.3g} of the cold run: they differ by {result['cold_difference']:.3g}, "
            f"the next token is {'the same' if result['same_token'] else 'another'}",
        ),
    ]


def _as_it_was(result: Mapping[str, Any]) -> Check:
    if result["exact"] or not result["codec"]:
        return Check(result["exact"], "logits equal those of the same split without kvloom, bit for bit")
    return Check(result["same_text"], f"{result['codec']} rounds the KV, and the answer is the same text as without it")


def tolerance_note(result: Mapping[str, Any]) -> str:
    noise = max(result["split_difference"], result["resolution"])
    return (
        f"(The tolerance is {_NOISE} times {noise:.3g}: what prefilling the same prompt in two halves changes without "
        "kvloom, because sums in another order round differently.)"
    )


def print_results(console: Console, result: Mapping[str, Any], verdicts: list[Check]) -> None:
    from rich import box
    from rich.table import Table

    report = result["report"]
    table = Table(box=box.SIMPLE_HEAD, title="time to first token, median of 3", title_justify="left")
    for name in ("", "without kvloom", "from stored KV"):
        table.add_column(name, justify="left" if not name else "right")
    cold, warm = result["cold_seconds"], result["warm_seconds"]
    by_tier = ", ".join(f"{tokens:,} from {tier}" for tier, tokens in report["by_tier"].items())
    table.add_row("prompt", f"{result['prompt_tokens']:,} tokens", f"{result['prompt_tokens']:,} tokens")
    table.add_row("found", "-", by_tier or "nothing")
    table.add_row("KV loaded", "-", f"{result['bytes'] / 2**20:.1f} MiB")
    for name, seconds in parts(result).items():
        table.add_row(f"  {name}", "-" if name != "prefill" else _ms(cold), _ms(seconds))
    table.add_row("time to first token", _ms(cold), _ms(warm), style="bold")
    table.add_row("factor", "1.0", f"{cold / warm:.1f}", style="bold")
    console.print(table)
    for verdict in verdicts:
        console.print(
            f"{'ok    ' if verdict.holds else 'FAILED'} {verdict.text}",
            style="" if verdict.holds else "red",
            soft_wrap=True,
        )
    console.print(tolerance_note(result), style="dim", soft_wrap=True)


def parts(result: Mapping[str, Any]) -> dict[str, float]:
    """The parts of the warm run's time, in seconds."""
    report = result["report"]
    known = {
        "look up": report["lookup_seconds"],
        "load and verify": report["load_seconds"],
        "prefill": report["compute_seconds"],
    }
    return known | {"check call and model": result["warm_seconds"] - sum(known.values())}


def draw_chart(result: Mapping[str, Any], path: Path) -> None:
    """Two bars: the time to the first token without kvloom, and its parts with it. ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.barh(0, result["cold_seconds"] * 1e3, color="#9aa5b1", label="prefill, whole prompt")
    left, rest = 0.0, result["prompt_tokens"] - result["report"]["hit_tokens"]
    for (name, seconds), color in zip(parts(result).items(), ("#1d4d36", "#63b58a", "#c7cdd4", "#e6b54a"), strict=True):
        label = f"{name}, {rest:,} tokens" if name == "prefill" else name
        axes.barh(1, seconds * 1e3, left=left, color=color, label=label)
        left += seconds * 1e3
    axes.set_yticks([0, 1], ["without kvloom", "from stored KV"])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds to the first token")
    factor = result["cold_seconds"] / result["warm_seconds"]
    axes.set_title(f"{result['prompt_tokens']:,} tokens: factor {factor:.1f}", loc="left", fontsize=11)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=5)
    axes.spines[["top", "right"]].set_visible(False)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=150, format="png")
    replace_file(path, drawn.getvalue())


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
