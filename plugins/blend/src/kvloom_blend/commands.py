"""`kvloom blend verify` and `kvloom blend demo`. Their dependencies are imported inside them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .verify import Finding, Quality

_FILE = {"exists": True, "dir_okay": False, "readable": True}


class Dtype(StrEnum):
    """In which a model is tried."""

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
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A transformers model: a path, or a name on a hub.")],
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Documents, separated by blank lines (default: texts of Python's).", **_FILE),
    ] = None,
    executor: Annotated[
        str, typer.Option(metavar="TYPE", help="The executor; it must have a recompute_ratio.")
    ] = "cacheblend",
    dtype: Annotated[
        list[Dtype] | None, typer.Option(help="May be given again (default: float32 and bfloat16).")
    ] = None,
    tokens: Annotated[int, typer.Option(min=32, help="Maximum tokens of each document.")] = 200,
    max_kl: Annotated[
        float | None, typer.Option(min=0, help="Maximum KL at 15 %, in nats a token (default: no limit).")
    ] = None,
) -> None:
    """Check whether a model can be blended, and measure the loss at each recompute ratio.

    Exit status: 1 if a limit is missed, 2 if the model cannot be blended at all.
    """
    from . import screen

    dtypes = list(dict.fromkeys(dtype or [Dtype.FLOAT32, Dtype.BFLOAT16]))
    findings: dict[str, list[Finding]] = {}
    measured: list[Quality] = []
    for number, each in enumerate(dtypes):
        name = each.value
        findings[name], found = _tried(model, name, prompts, executor, tokens, measure=number == 0)
        measured = measured or found
    _print_findings(findings)
    screen.print_table(
        f"{executor}, {dtypes[0].value}: what blending costs", ("computed again", "KL", "top-1", "of all rows"),
        [
            (f"{one.ratio:.0%}", f"{one.agreement.kl:.2g}", f"{one.agreement.top1:.1%}", f"{one.computed_share:.0%}")
            for one in measured
        ],
    )  # fmt: skip
    missed = [f"{name}: {one.what}" for name, several in findings.items() for one in several if not one.holds]
    missed += [
        f"KL of {one.agreement.kl:.2g} at {one.ratio:.0%}, at most {max_kl:g}"
        for one in measured
        if max_kl is not None and one.ratio == _LIMITED_RATIO and not one.agreement.kl <= max_kl
    ]
    for what in missed:
        typer.echo(f"FAILED {what}")
    if missed:
        raise typer.Exit(1)
    typer.echo("ok     it can be blended")


_LIMITED_RATIO = 0.15


def _tried(
    model: str, dtype: str, prompts: Path | None, executor: str, tokens: int, *, measure: bool
) -> tuple[list[Finding], list[Quality]]:
    """Everything about a model in one dtype. Raises ConfigError for one that cannot be blended."""
    from kvloom import ConfigError

    from . import screen
    from . import verify as checks
    from .demo.texts import module_texts, read_texts
    from .loading import loaded

    loading, tokenizer = loaded(model, dtype)
    try:
        texts = read_texts(prompts) if prompts else module_texts()
        subject = checks.Subject(loading, tokenizer, texts, most_tokens=tokens)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError("MODEL" if prompts is None else "MODEL or --prompts", str(error)) from None
    try:
        chosen = subject.budgeted(executor, recompute_ratio=1.0)
        steps = len(checks.DELTAS) + len(subject.prompts) * (4 + measure * len(checks.RATIOS))
        with screen.progress(f"verifying {dtype}", steps) as step:
            subject.remember()
            findings = list(checks.rotations_hold(loading, subject.blended.runner.rotations, step=step))
            findings += checks.identities_hold(subject, chosen, step=step)
            return findings, list(checks.qualities(subject, executor, step=step)) if measure else []
    finally:
        subject.close()


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
        str, typer.Option(metavar="NAME_OR_PATH", help="Any plain decoder (default: evals/pylm of the repository).")
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
) -> None:
    """Ask questions about documents in new orders; show the time to first token, and agreement."""
    from kvloom import ConfigError

    from . import screen
    from .demo.measure import check_own, measure
    from .demo.report import checks, draw_chart, print_results, sparklines
    from .demo.texts import QUESTIONS, module_texts, read_texts
    from .loading import default_model, loaded

    option = "--out"
    try:
        check_own(out)
        option = "--documents"
        texts = read_texts(documents) if documents else module_texts()
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
    print_results(name, result)
    try:
        draw_chart(result, out / "blend.png")
        typer.echo(f"chart: {out / 'blend.png'}")
    except ImportError:
        typer.echo(sparklines(result))
        typer.echo("no chart: pip install matplotlib")
    typer.echo(f"figures: {out / 'blend.json'}, configuration: {out / 'blend.yaml'}")
    verdicts = checks(result)
    for holds, text in verdicts:
        screen.console().print(f"{'ok    ' if holds else 'FAILED'} {text}", soft_wrap=True)
    if not all(holds for holds, _ in verdicts):
        raise typer.Exit(1)
