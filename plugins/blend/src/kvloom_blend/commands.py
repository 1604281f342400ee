"""`kvloom blend verify` and `kvloom blend demo`. Their dependencies are imported inside them."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .scoring import Scoring
    from .verify import Finding, Quality

_FILE = {"exists": True, "dir_okay": False, "readable": True}


class Dtype(StrEnum):
    """The dtype in which a model is tried."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def add(commands: typer.Typer) -> None:
    """Add the group `blend`."""
    group = typer.Typer(
        name="blend",
        help="Reuse KV of passages wherever they stand in a prompt: is a model fit for it, and what does it bring?",
        rich_markup_mode=None,
        no_args_is_help=True,
    )
    group.command("verify")(verify)
    group.command("demo")(demo)
    commands.add_typer(group, name="blend")


def verify(
    model: Annotated[str, typer.Option(metavar="MODEL", help="A transformers model: a directory, or a name on a hub.")],
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Documents, separated by blank lines (default: texts of Python's).", **_FILE),
    ] = None,
    executor: Annotated[
        str, typer.Option(metavar="TYPE", help="The executor; it must have a recompute_ratio.")
    ] = "hybrid",
    dtype: Annotated[
        list[Dtype] | None, typer.Option(help="May be given again (default: float32 and bfloat16).")
    ] = None,
    tokens: Annotated[int, typer.Option(min=32, help="Maximum tokens of each document.")] = 200,
    max_kl: Annotated[
        float | None, typer.Option(min=0, help="Maximum KL at 15 %, in nats a token (default: no limit).")
    ] = None,
    tasks: Annotated[
        int, typer.Option(metavar="ITEMS", min=0, help="Items of each task of `kvloom eval` to score.")
    ] = 0,
    ratio: Annotated[
        list[float] | None,
        typer.Option(min=0, max=1, help="With --tasks: the ratio to score; may be given again (default: 0.15)."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --tasks: file for the verdicts, for `blend.verdict` (default: MODEL.verdicts, here).",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file of verdicts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check whether a model can be blended, and measure the loss at each recompute ratio.

    Tasks are scored in the first dtype. Exit status: 1 if a limit is missed or a task is answered worse, 2 if the model
    cannot be blended at all.
    """
    from kvloom import ConfigError

    from . import screen
    from . import verify as checks
    from .demo.texts import module_texts, read_texts

    checks.check_budgeted(executor)  # before a model is loaded
    scoring = _scoring(model, executor, tasks, ratio, out, force) if tasks or ratio or out or force else None
    try:
        texts = read_texts(prompts) if prompts else module_texts()
        checks.check_count(texts)
    except ValueError as error:
        raise ConfigError("--prompts", str(error)) from None
    dtypes = list(dict.fromkeys(dtype or [Dtype.FLOAT32, Dtype.BFLOAT16]))
    findings: dict[str, list[Finding]] = {}
    measured: list[Quality] = []
    for number, each in enumerate(dtypes):
        name = each.value
        findings[name], found = _tried(
            model, name, texts, executor, tokens, measure=number == 0, scoring=None if number else scoring
        )
        measured = measured or found
    missed = [f"{name}: {one.what}" for name, several in findings.items() for one in several if not one.holds]
    missed += [
        f"KL of {one.agreement.kl:.2g} at {one.ratio:.0%}, at most {max_kl:g}"
        for one in measured
        if max_kl is not None and one.ratio == _LIMITED_RATIO and not one.agreement.kl <= max_kl
    ]
    if scoring is not None:
        missed += scoring.save(missed)
    if as_json:
        found = {name: [{**asdict(one), "holds": one.holds} for one in several] for name, several in findings.items()}
        ratios = [asdict(one) for one in measured]
        made = {"model": model, "executor": executor, "failed": missed, "findings": found, "ratios": ratios}
        if scoring is not None:
            made |= {"verdicts": scoring.verdicts}
        print(json.dumps(made, indent=2))
    else:
        _print_findings(findings)
        screen.print_table(
            f"{executor}, {dtypes[0].value}: what blending costs", ("computed again", "KL", "top-1", "of all rows"),
            [
                (
                    f"{one.ratio:.0%}", f"{one.agreement.kl:.2g}", f"{one.agreement.top1:.1%}",
                    f"{one.computed_share:.0%}",
                )
                for one in measured
            ],
        )  # fmt: skip
        if scoring is not None:
            scoring.print()
        typer.echo("\n".join(f"FAILED {what}" for what in missed) or "ok     it can be blended")
    if missed:
        raise typer.Exit(1)


_LIMITED_RATIO = 0.15


def _tried(
    model: str, dtype: str, texts: list[str], executor: str, tokens: int, *, measure: bool, scoring: Scoring | None
) -> tuple[list[Finding], list[Quality]]:
    """Everything about a model in one dtype. Raises ConfigError for one that cannot be blended."""
    from kvloom import ConfigError

    from . import screen
    from . import verify as checks
    from .loading import loaded

    loading, tokenizer = loaded(model, dtype)
    try:
        subject = checks.Subject(loading, tokenizer, texts, most_tokens=tokens)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError("--model or --prompts", str(error)) from None
    try:
        chosen = subject.budgeted(executor, recompute_ratio=1.0)
        steps = len(checks.DELTAS) + len(subject.prompts) * (4 + measure * len(checks.RATIOS))
        with screen.progress(f"verifying {dtype}", steps) as step:
            subject.remember()
            findings = list(checks.rotations_hold(loading, subject.blended.runner.rotations, step=step))
            findings += checks.identities_hold(subject, chosen, step=step)
            measured = list(checks.qualities(subject, executor, step=step)) if measure else []
    finally:
        subject.close()
    if scoring is not None:
        scoring.measure(loading, tokenizer, subject.spec)
    return findings, measured


def _scoring(
    model: str, executor: str, tasks: int, ratios: list[float] | None, out: Path | None, force: bool
) -> Scoring:
    """Raises ConfigError for arguments that cannot work."""
    from kvloom import ConfigError, check_folder

    from .scoring import Scoring

    if tasks < 2:
        raise ConfigError("--tasks", f"{tasks}; two or more, and with --ratio, --out and --force")
    name = Path(model).resolve().name if Path(model).is_dir() else model.replace("/", "--")
    out = out or Path(f"{name}.verdicts")
    if not out.parent.is_dir():
        raise ConfigError("--out", f"there is no directory {str(out.parent)!r}")
    if out.exists() and not force:
        raise ConfigError("--out", f"{out} exists; name another, or overwrite it with --force")
    if out.is_dir():
        raise ConfigError("--out", f"{out} is a directory; name a file")
    try:
        check_folder(out.parent)
    except OSError as error:
        raise ConfigError("--out", f"{out} cannot be written ({error.strerror}); name another file") from None
    return Scoring(executor, list(dict.fromkeys(ratios or [_LIMITED_RATIO])), tasks, out)


def _print_findings(findings: dict[str, list[Finding]]) -> None:
    from . import screen

    whats = list(dict.fromkeys(one.what for several in findings.values() for one in several))
    rows = []
    for what in whats:
        row = [what]
        for several in findings.values():
            one = next((each for each in several if each.what == what), None)
            row.append(f"{one.measured:.1e} / {one.limit:.0e}" if one else "-")
        rows.append(row)
    screen.print_table(
        "exact but for rounding: largest error of K or of logits / limit",
        ("", *findings), rows,
    )  # fmt: skip


def demo(
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="A transformers model (default: evals/pylm of the repository).")
    ] = "",
    documents: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Texts, separated by blank lines (default: texts of Python's).", **_FILE),
    ] = None,
    question: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="The question; may be given again.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=16, help="Maximum tokens of each document.")] = 400,
    orders: Annotated[int, typer.Option(min=1, help="Number of orders of the documents.")] = 4,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for chart, figures and configuration.")] = Path(
        "demo-out"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask questions about documents in new orders; show the time to first token, and agreement."""
    from kvloom import ConfigError

    from . import screen
    from .demo.measure import check_count, check_own, measure
    from .demo.report import checks, draw_chart, print_results, sparklines
    from .demo.texts import QUESTIONS, module_texts, read_texts
    from .loading import default_model, loaded

    option = "--out"
    try:
        check_own(out)
        option = "--documents"
        texts = read_texts(documents) if documents else module_texts()
        check_count(texts)
    except ValueError as error:
        raise ConfigError(option, str(error)) from None
    name = model or default_model()
    loading, tokenizer = loaded(name, None)
    try:
        result = measure(
            loading, tokenizer, texts, question or list(QUESTIONS), most_tokens=tokens, orders=orders, out=out
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError("demo", str(error)) from None
    verdicts = checks(result)
    try:
        draw_chart(result, out / "blend.png")
        chart = f"chart: {out / 'blend.png'}"
    except ImportError:
        chart = f"{sparklines(result)}\nno chart: pip install matplotlib"
    if as_json:
        judged = [{"holds": holds, "text": text} for holds, text in verdicts]
        print(json.dumps({"model": name, **asdict(result), "checks": judged}, indent=2))
    else:
        print_results(name, result)
        typer.echo(f"{chart}\nfigures: {out / 'blend.json'}, configuration: {out / 'blend.yaml'}")
        for holds, text in verdicts:
            screen.console().print(f"{'ok    ' if holds else 'FAILED'} {text}", soft_wrap=True)
    if not all(holds for holds, _ in verdicts):
        raise typer.Exit(1)
