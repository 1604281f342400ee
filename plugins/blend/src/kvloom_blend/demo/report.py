"""Prints the demo's results: a table, a chart of KL against ratio, and checks of its claims."""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path

from kvloom import replace_file

from .. import screen
from .measure import ANSWER_TOKENS, Result, Row

_BLOCKS = "▁▂▃▄▅▆▇█"
_NOTHING = 1e-7
"""A KL below this is drawn as this: rounding."""


def print_results(model: str, result: Result) -> None:
    count = len(result.document_tokens)
    console = screen.console()
    console.print(
        f"{model}: {count} documents, {sum(result.document_tokens):,} tokens, each computed once, alone", style="bold"
    )
    console.print(
        f"{result.prompts} questions, each over all documents in an order of its own; prompts of "
        f"{result.prompt_tokens:,} tokens",
        soft_wrap=True,
    )
    if result.example is not None:
        console.print(f"\n... {result.example.question}", soft_wrap=True)
        console.print(f"  whole prefill      {' '.join(result.example.whole.split())}", soft_wrap=True)
        console.print(f"  cacheblend, 15 %   {' '.join(result.example.blended.split())}\n", soft_wrap=True)
    whole = ("whole prefill", "-", f"{result.seconds * 1e3:.0f}", "1.0x", "-", "-")
    rows = [whole, *(_cells(row, result) for row in result.rows)]
    screen.print_table(
        f"time to first token, median of {result.prompts}; agreement with a whole prefill over {ANSWER_TOKENS} tokens",
        ("executor", "computed again", "TTFT ms", "faster", "KL", "top-1"), rows,
    )  # fmt: skip


def _cells(row: Row, result: Result) -> tuple[str, ...]:
    factor = result.seconds / row.seconds
    return (
        row.executor, f"{row.ratio:.0%}", f"{row.seconds * 1e3:.0f}", f"{factor:.1f}x", f"{row.agreement.kl:.2g}",
        f"{row.agreement.top1:.1%}",
    )  # fmt: skip


def checks(result: Result) -> list[tuple[bool, str]]:
    """The demo fails if one of them does not hold."""
    return [
        (result.all_found, "every document was found in every prompt, whatever its place"),
        (
            result.off <= result.limit,
            f"everything computed again is a whole prefill: logits differ by {result.off:.1e}, "
            f"at most {result.limit:.0e}",
        ),
    ]


def curves(result: Result) -> dict[str, list[tuple[float, float]]]:
    """Ratio and KL of each executor that has a ratio. The first point is `none`, which recomputes nothing."""
    start = [(row.ratio, row.agreement.kl) for row in result.rows if row.executor == "none"]
    words = dict.fromkeys(row.executor for row in result.rows if row.executor not in ("none", "full"))
    return {
        word: start + [(row.ratio, row.agreement.kl) for row in result.rows if row.executor == word] for word in words
    }


def sparklines(result: Result) -> str:
    """A line for each executor: KL at its ratios, on a logarithmic scale that all of them share."""
    found = curves(result)
    logs = [_log(kl) for points in found.values() for _, kl in points]
    low, high = min(logs), max(logs)
    ratios = " ".join(f"{ratio:.0%}" for ratio, _ in next(iter(found.values())))
    lines = [f"KL at {ratios}, from {10**low:.1g} to {10**high:.1g}"]
    for word, points in found.items():
        height = [(_log(kl) - low) / (high - low or 1) * (len(_BLOCKS) - 1) for _, kl in points]
        lines.append(f"{word:20} {''.join(_BLOCKS[round(each)] for each in height)}")
    return "\n".join(lines)


def _log(kl: float) -> float:
    return math.log10(max(kl, _NOTHING))


def draw_chart(result: Result, path: Path) -> None:
    """KL against ratio, a line for each executor. ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for word, points in curves(result).items():
        style = {"color": "#9aa5b1", "linestyle": "--"} if word == "random" else {}
        ratios, kl = zip(*points, strict=True)
        axes.plot(
            [100 * ratio for ratio in ratios], [max(one, _NOTHING) for one in kl], marker="o", label=word, **style
        )
    axes.set_yscale("log")
    axes.set_xlabel("documents' tokens computed again, %")
    axes.set_ylabel("KL to a whole prefill, nats a token")
    axes.set_title(f"{len(result.document_tokens)} documents in {result.prompts} orders", loc="left", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=144, format="png")
    replace_file(path, drawn.getvalue())
