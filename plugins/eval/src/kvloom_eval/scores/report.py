"""Results as a page, and as a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from kvloom import replace_file
from kvloom_eval.scores.results import Results, Scores, Task
from kvloom_eval.scores.rows import EXACT, FULL
from kvloom_eval.scores.statistics import Mean

RAW_BITS = 16
FAMILIES = {"step": "o", "klt": "s", "others": "x"}


def page(about: Mapping[str, object], codecs: Results | None, blending: Results | None, profile_bytes: int) -> str:
    """A page in Markdown. profile_bytes: size of the file that `klt` and `+profile` read, 0 if none was read."""
    settings = "; ".join(f"{name}: {value}" for name, value in about.items() if name != "model")
    lines = [f"# {about['model']} with lossy KV", "", settings, ""]
    if codecs is not None:
        lines += ["## Tasks", "", *tasks(codecs.tasks), "", "## Codecs", "", *codec_table(codecs), ""]
        if profile_bytes:
            lines += [f"The profile has {profile_bytes:,} bytes; the bits of codecs do not count it.", ""]
    if blending is not None:
        lines += ["## Blending", "", *tasks(blending.tasks), "", *blend_table(blending), ""]
    return "\n".join(lines)


def tasks(found: Sequence[Task]) -> list[str]:
    """A table of tasks, and why some do not count."""
    lines = [
        "| task | items | questions | tokens | chance % | exact KV % | greedy % | no context % | counts |",
        "|---|" + "---:|" * 7 + "---|",
    ]
    for each in found:
        tokens = f"{each.tokens:,}" if each.tokens else "-"
        lines.append(
            f"| {each.name} | {each.items} | {each.questions} | {tokens} | {100 * each.chance:.0f} | "
            f"{_interval(each.exact)} | {100 * each.exact_match:.0f} | {100 * each.without.mean:.0f} | "
            f"{(each.dropped and f'no: {each.dropped}') or 'yes'} |"
        )
    return lines


def codec_table(results: Results) -> list[str]:
    """A row for each codec, those with the most bits first."""
    kept = results.kept
    lines = [
        "| codec | bits | ratio | score % | loss, points | probability, points | text KL | top-1 % | dNLL | "
        + " | ".join(kept) + (" | " if kept else "") + "worse in |",
        "|---|" + "---:|" * (8 + len(kept)) + "---|",
    ]  # fmt: skip
    for one in sorted(results.scores, key=lambda each: -(each.bits or (99 if each.name == EXACT else -1))):
        bits = RAW_BITS if one.name == EXACT else one.bits
        words = [
            one.name, "-" if bits is None else f"{bits:.2f}", "-" if bits is None else f"{RAW_BITS / bits:.2f}",
            _percent(one.mean), _loss(one, EXACT), _signed(one.probability_loss, one.name == EXACT),
            *_text(one), *(_percent(one.tasks.get(task)) for task in kept), ", ".join(one.worse) or "-",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(words)} |")
    return lines


def blend_table(results: Results) -> list[str]:
    """A row for each executor and ratio."""
    kept = results.kept
    lines = [
        "| executor | rows computed % | seconds | score % | of full prefill % | loss, points | answer KL | "
        + " | ".join(kept) + (" | " if kept else "") + "worse in |",
        "|---|" + "---:|" * (6 + len(kept)) + "---|",
    ]  # fmt: skip
    whole = next((each.mean.mean for each in results.scores if each.name == FULL and each.mean), None)
    for one in results.scores:
        share = "-" if one.share is None else f"{100 * one.share:.0f}"
        seconds = "-" if one.seconds is None else f"{one.seconds:.2f}"
        relative = "-" if one.mean is None or not whole else f"{100 * one.mean.mean / whole:.1f}"
        kl = "-" if one.answer_kl is None else f"{one.answer_kl:.3f}"
        words = [
            one.name.removesuffix(", blend"), share, seconds, _percent(one.mean), relative, _loss(one, FULL), kl,
            *(_percent(one.tasks.get(task)) for task in kept), ", ".join(one.worse) or "-",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(words)} |")
    return lines


def draw_codecs(results: Results, file: Path) -> None:
    """Score and divergence against bits a value. ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots(1, 2)
    points = [each for each in results.scores if each.bits]
    for family, marker in FAMILIES.items():
        some = sorted((each for each in points if _family(each.name) == family), key=lambda each: each.bits or 0)
        scored = [each for each in some if each.loss is not None]
        if scored:
            losses = [each.loss for each in scored if each.loss]
            axes[0].errorbar(
                [each.bits for each in scored], [100 * each.mean for each in losses],
                yerr=[
                    [100 * (each.mean - each.low) for each in losses],
                    [100 * (each.high - each.mean) for each in losses],
                ],
                fmt=marker, capsize=3, label=family,
            )  # fmt: skip
        for each in scored:
            assert each.loss is not None
            axes[0].annotate(
                each.name, (each.bits, 100 * each.loss.mean), fontsize=7, xytext=(4, 4), textcoords="offset points"
            )
        measured = [each for each in some if each.text and each.text["kl"] > 0]
        if measured:
            axes[1].plot([each.bits for each in measured], [each.text["kl"] for each in measured], marker, label=family)
        for each in measured:
            axes[1].annotate(
                each.name, (each.bits, each.text["kl"]), fontsize=7, xytext=(4, 4), textcoords="offset points"
            )
    axes[0].axhline(0, color="grey", linestyle=":")
    axes[0].set(xlabel="bits a value", ylabel="score against exact KV, points (95 %)")
    axes[1].set(xlabel="bits a value", ylabel="KL on text, nats a token", yscale="log")
    for each in axes:
        each.grid(alpha=0.3)
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(fontsize=8)
    _save(figure, file)


def draw_blending(results: Results, file: Path) -> None:
    """Score against the share of rows computed. ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[Scores]] = {}
    for each in results.scores:
        if each.share is not None and each.mean is not None and each.name != FULL:
            lines.setdefault(each.name.partition("/")[0], []).append(each)
    none = lines.pop("none", [])
    for name, some in sorted(lines.items() or {"none": []}.items()):
        some = sorted([*none, *some], key=lambda each: each.share or 0)
        axes.plot(
            [100 * (each.share or 0) for each in some], [100 * each.mean.mean for each in some if each.mean],
            marker="o", markersize=4, label=name,
        )  # fmt: skip
    for each in results.scores:
        if each.mean is not None and each.share is None:
            axes.axhline(100 * each.mean.mean, color="grey", linestyle=":", label="no context")
        if each.mean is not None and each.name == FULL:
            axes.axhspan(100 * each.mean.low, 100 * each.mean.high, color="grey", alpha=0.15)
            axes.axhline(100 * each.mean.mean, color="black", linewidth=1, label="full prefill (95 %)")
    axes.set(xlabel="rows computed, % of a whole prefill", ylabel="score, %")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    _save(figure, file)


# -- inside ------------------------------------------------------------------------------------------------------------


def _save(figure: Any, file: Path) -> None:
    drawn = BytesIO()
    figure.savefig(drawn, dpi=90, format="png")
    replace_file(file, drawn.getvalue())


def _family(name: str) -> str:
    word = name.partition("+")[0].partition("/")[0]
    return {"high": "step", "default": "step", "small": "step"}.get(word, word if word in FAMILIES else "others")


def _interval(found: Mean) -> str:
    return f"{100 * found.mean:.0f} ({100 * found.low:.0f} to {100 * found.high:.0f})"


def _percent(found: Mean | None) -> str:
    return "-" if found is None else f"{100 * found.mean:.1f}"


def _signed(found: Mean | None, same: bool = False) -> str:
    if found is None or same:
        return "-"
    return f"{100 * found.mean:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def _loss(one: Scores, reference: str) -> str:
    return _signed(one.loss, one.name == reference)


def _text(one: Scores) -> list[str]:
    if not one.text:
        return ["-"] * 3
    return [f"{one.text['kl']:.2g}", f"{100 * one.text['top1']:.1f}", f"{one.text['dnll']:+.4f}"]
