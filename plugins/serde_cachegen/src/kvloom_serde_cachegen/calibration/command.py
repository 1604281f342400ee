"""The verb `kvloom calibrate`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom import KVLoomError, check_folder, pip_install

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvloom import KVSpec
    from kvloom_serde_cachegen.calibration.calibrating import Limits
    from kvloom_serde_cachegen.profile import Profile, Verdict

JUDGED = ("klt/0.5", "klt/0.25", "step/0.75", "step/0.375", "step/0.25")
"""The default modes and steps of `--verify`."""
_WINDOW_TOKENS = 1024
_FEWEST_TOKENS = 16
"""In a window: its beginning is left out, and what follows its first two thirds is predicted."""
_JUDGED_TOKENS, _JUDGED_WINDOWS, _FEWEST_WINDOWS = 768, 16, 4

_EXISTING = {"exists": True, "dir_okay": False, "readable": True}


def calibrate(
    model: Annotated[str, typer.Option(metavar="MODEL", help="A transformers model: a directory, or a name on a hub.")],
    text: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="Text like that of your prompts; more files may follow.", **_EXISTING),
    ],
    more: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="More text.", **_EXISTING)] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the profile (default: MODEL.kvprofile, here).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing profile.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Measure the codec's effect on the model, for `codec_gate`.")
    ] = False,
    klt: Annotated[bool, typer.Option("--klt/--no-klt", help="Include the data for the mode klt.")] = True,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODE/STEP", help=f"Mode and step to measure with --verify (default: each of {', '.join(JUDGED)})."
        ),
    ] = None,
    tasks: Annotated[
        int, typer.Option(metavar="ITEMS", min=0, help="With --verify: items of each task of `kvloom eval` to score.")
    ] = 0,
    tokens: Annotated[int, typer.Option(min=_FEWEST_TOKENS, help="Maximum number of tokens to calibrate on.")] = 32_768,
    device: Annotated[str, typer.Option(help="Device that runs the model, such as cuda.")] = "cpu",
    max_kl: Annotated[float, typer.Option(min=0, help="Maximum change of predictions, in nats a token.")] = 1e-3,
    max_dnll: Annotated[
        float, typer.Option(min=0, help="Maximum loss of the text's log-likelihood, in nats a token.")
    ] = 0.01,
    min_top1: Annotated[
        float, typer.Option(min=0, max=1, help="Minimum share of likeliest tokens that stay the same.")
    ] = 0.98,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a profile of a model's KV, with which `cachegen` loses less.

    The last fifth of each file is kept for --verify.
    """
    try:
        import transformers  # noqa: F401

        from kvloom_connector_transformers import spec_of  # noqa: F401
    except ImportError as error:
        raise KVLoomError(
            f"calibrating needs transformers ({error}): {pip_install('kvloom-serde-cachegen', 'calibrate')}"
        ) from None
    if tasks == 1 or (tasks and not verify):
        raise typer.BadParameter("two or more, and with --verify", param_hint="--tasks")
    if tasks:
        try:
            import kvloom_eval  # noqa: F401
        except ImportError as error:
            raise KVLoomError(f"--tasks needs kvloom-eval ({error}): {pip_install('kvloom-eval')}") from None
    from kvloom_serde_cachegen.calibration.calibrating import Limits

    if not Path(model).is_dir() and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise typer.BadParameter(f"there is no directory {model!r}", param_hint="--model")
    for option, limit in (("--max-kl", max_kl), ("--max-dnll", max_dnll), ("--min-top1", min_top1)):
        if not math.isfinite(limit):
            raise typer.BadParameter(f"{limit} is no limit", param_hint=option)
    if out is not None and not out.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {str(out.parent)!r}", param_hint="--out")
    name = Path(model).resolve().name if Path(model).is_dir() else model
    out = out or Path(f"{name.replace('/', '--')}.kvprofile")
    if out.exists() and not force:
        raise typer.BadParameter(f"{out} exists; name another, or overwrite it with --force", param_hint="--out")
    if out.is_dir():
        raise typer.BadParameter(f"{out} is a directory; name a file", param_hint="--out")
    try:
        check_folder(out.parent)
    except OSError as error:
        raise typer.BadParameter(
            f"{out} cannot be written to ({error.strerror}); name another file", param_hint="--out"
        ) from None
    wanted = _Wanted(
        model, name, [*text, *(more or ())], out, tokens, device, klt,
        _codecs(codec, klt=klt) if verify else [], Limits(max_kl, max_dnll, min_top1), tasks, as_json,
    )  # fmt: skip
    try:
        _calibrate(wanted)
    except (ValueError, OSError) as error:
        raise KVLoomError(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One call of the verb."""

    model: str
    name: str
    """The model's name for people."""
    files: Sequence[Path]
    out: Path
    tokens: int
    device: str
    klt: bool
    codecs: Sequence[str]
    """To be judged."""
    limits: Limits
    tasks: int
    """Number of items of each task."""
    as_json: bool


def _codecs(given: Sequence[str] | None, *, klt: bool) -> list[str]:
    """Names of codecs as serializers use them; `step/.50` becomes `step/0.5`."""
    from kvloom_serde_cachegen.settings import MOST_STEP  # here: help loads no pydantic

    found = []
    for codec in given or [each for each in JUDGED if klt or not each.startswith("klt/")]:
        match = re.fullmatch(r"(step|klt)/(\d*\.?\d+)", codec)
        if match is None:
            raise typer.BadParameter(f"{codec!r} is not a mode and step, such as step/0.6", param_hint="--codec")
        if not 0 < float(match[2]) <= MOST_STEP:
            raise typer.BadParameter(f"{codec}: a step is more than 0 and at most {MOST_STEP:g}", param_hint="--codec")
        if match[1] == "klt" and not klt:
            raise typer.BadParameter(f"{codec} needs --klt", param_hint="--codec")
        found.append(f"{match[1]}/{float(match[2]):g}")
    return found


def _calibrate(wanted: _Wanted) -> None:
    from kvloom_serde_cachegen.calibration import text
    from kvloom_serde_cachegen.calibration.calibrating import calibrated, loaded, saved_per_token

    ours, theirs = text.read(wanted.files, tokens=wanted.tokens)
    load, tokenizer, config = loaded(wanted.model, wanted.device)
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or _WINDOW_TOKENS
    length = min(_WINDOW_TOKENS, longest, wanted.tokens)
    windows = text.windows(tokenizer, ours, length=length, count=wanted.tokens // length)
    if not len(windows):
        raise ValueError(f"no file has {length} tokens, which is the least; give --text more, or less with --tokens")
    held_out = text.windows(tokenizer, theirs, length=min(_JUDGED_TOKENS, longest), count=_JUDGED_WINDOWS)
    if wanted.codecs and len(held_out) < _FEWEST_WINDOWS:
        raise ValueError(
            f"the last fifths of the files have {len(held_out)} pieces of {held_out.shape[1]} tokens; to judge by them "
            f"takes {_FEWEST_WINDOWS}: give --text more"
        )
    model = load()
    with _progress(f"calibrating {wanted.name}", len(windows)) as step:
        profile, spec = calibrated(model, windows, name=wanted.name, klt=wanted.klt, step=step)
    profile.save(wanted.out)
    saved = saved_per_token(model, windows[0], wanted.out, spec) if wanted.klt else None
    verdicts = _verify(model, tokenizer, held_out, profile, spec, wanted) if wanted.codecs else {}
    size = wanted.out.stat().st_size
    if wanted.as_json:
        print(json.dumps({
            "profile": str(wanted.out), "bytes": size, "calibrated_tokens": profile.calibrated_tokens,
            "rotary_size": profile.rotary_size, "klt_saves_bytes_per_token": saved,
            "verdicts": {codec: asdict(verdict) for codec, verdict in verdicts.items()},
        }, indent=2))  # fmt: skip
        return
    print(f"{wanted.out}: {size:,} bytes, from {profile.calibrated_tokens:,} tokens, {_about(profile)}")
    if saved is not None:
        print(_break_even(size, saved))
    if verdicts:
        _print(verdicts)


def _verify(
    model: PreTrainedModel, tokenizer: Any, windows: torch.Tensor, profile: Profile, spec: KVSpec, wanted: _Wanted
) -> Mapping[str, Verdict]:
    """Measure the codecs, write the verdicts into the profile, and return them."""
    from kvloom_serde_cachegen import measuring
    from kvloom_serde_cachegen.calibration.calibrating import judged, serializer

    codecs = {codec: measuring.through(serializer(codec, wanted.out, spec)) for codec in wanted.codecs}
    with _progress("verifying", len(windows)) as step:
        verdicts = judged(model, windows, codecs, wanted.limits, dtype=spec.torch_dtype, step=step)
    if wanted.tasks:
        from kvloom_eval import judge, steps

        with _progress("scoring", steps(wanted.tasks)) as step:
            scores = judge(model, tokenizer, codecs, items=wanted.tasks, dtype=spec.torch_dtype, step=step)
        verdicts = {name: verdict.with_scores(scores[name]) for name, verdict in verdicts.items()}
    replace(profile, verdicts=verdicts).save(wanted.out)
    return verdicts


def _break_even(profile_bytes: int, saved: float) -> str:
    """saved: bytes a token."""
    if saved <= 0:
        return "klt is no smaller than step on this text: calibrate on more text, or use the mode step"
    tokens = math.ceil(profile_bytes / saved)
    return (
        f"klt saves {saved:,.0f} bytes a token against step: the profile has paid for itself from {tokens:,} tokens on"
    )


def _about(profile: Profile) -> str:
    if profile.rotary_size:
        return f"K before RoPE, which rotates {profile.rotary_size} of the {profile.head_size} channels of a head"
    return "K as it is: no RoPE was looked for, or found"


def _print(verdicts: Mapping[str, Verdict]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    scored = any(verdict.scores for verdict in verdicts.values())
    for column in ("codec", "bits", "KL", "dNLL", "top-1", *(["tasks", "exact"] if scored else []), "verdict"):
        table.add_column(column, justify="left" if column in ("codec", "verdict") else "right", no_wrap=True)
    for name, verdict in verdicts.items():
        means = [
            f"{sum(score[which] for score in verdict.scores.values()) / len(verdict.scores):.1%}"
            for which in ("codec", "exact")
            if verdict.scores
        ]
        table.add_row(
            name, f"{verdict.bits_per_value:.2f}", f"{verdict.kl:.2g} ± {verdict.kl_error:.1g}", f"{verdict.dnll:+.2g}",
            f"{verdict.top1:.2%}", *means, "passed" if verdict.passed else "failed",
        )  # fmt: skip
    screen = Console(markup=False, highlight=False)
    screen.print(table)
    for name, verdict in verdicts.items():
        if verdict.worse:
            screen.print(f"{name} costs answers in {', '.join(verdict.worse)}", soft_wrap=True)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], Any]]:
    """A bar on a terminal; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
