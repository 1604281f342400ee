"""The verb `kvloom eval`."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom import KVLoomError, check_folder, replace_file

if TYPE_CHECKING:
    from kvloom_eval.blending import Blender
    from kvloom_eval.codecs import Wanted
    from kvloom_eval.running import Plan

_CALIBRATION_TOKENS, _QUICK_TOKENS, _WINDOW = 32_768, 8_192, 1024
_ROWS, _WRITTEN = "rows.jsonl", ("results.json", "results.md", "codecs.png", "blending.png")
_ITEMS, _QUICK_ITEMS, _QUICK_CONTEXT = 24, 4, 512


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A transformers model: a folder, a name on a hub, or smollm2.")
    ],
    tasks: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Tasks with commas between (default: all), and text.")
    ] = None,
    codec: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Codecs: levels, modes with steps, peers; or none.")
    ] = None,
    blend: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Executors, alone or with a share as in epic/0.1; or default.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=128, help="Tokens of the context; may be given again (default: 1024).")
    ] = None,
    items: Annotated[
        int | None, typer.Option(min=2, help="Items of each task and context (default: 24, 4 with --quick).")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A look in minutes: contexts of 512 tokens, 4 items of each task, unless given."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for rows, table and charts (default: eval-MODEL).")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The output of `kvloom calibrate` (default: made here).")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Ask in plain text, without a chat template.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the items.")] = 0,
    device: Annotated[str, typer.Option(help="Device that runs the model, such as cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="The model's dtype.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="Threads of the model.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score a model on tasks that need the context: exact KV, KV after each codec, and blended KV.

    Results of items are kept; the same command goes on after an interruption.
    """
    from kvloom_eval import blending, codecs, running
    from kvloom_eval.scores import rows
    from kvloom_eval.tasks import TASKS

    wanted = [
        codecs.parsed(word)
        for word in _words(codec, () if blend and codec is None else codecs.DEFAULT)
        if word != "none"
    ]
    known = (rows.TEXT, *TASKS)
    chosen = _words(tasks, known)
    for word in chosen:
        if word not in known:
            raise KVLoomError(f"--tasks: there is no task {word!r}; there are {', '.join(known)}")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise KVLoomError(f"--dtype: {dtype!r} is none of float32, bfloat16 and float16")
    contexts = list(dict.fromkeys(context or [_QUICK_CONTEXT if quick else _WINDOW]))
    plan = running.Plan(chosen, contexts, items or (_QUICK_ITEMS if quick else _ITEMS), seed)
    blends = [each for word in _words(blend, ()) for each in (blending.DEFAULT if word == "default" else (word,))]
    blending.check(blends)
    if profile is not None:
        codecs.check_profile(profile)
    place = out or Path(f"eval-{Path(model).resolve().name if Path(model).is_dir() else model.replace('/', '--')}")
    _check_own(place)
    rows.check(place / _ROWS, _about(model, plan, plain=plain, dtype=dtype))
    _evaluate(
        model, plan, wanted, blends, place, profile, quick=quick, plain=plain, device=device, dtype=dtype,
        threads=threads, as_json=as_json,
    )  # fmt: skip


def _check_own(place: Path) -> None:
    """Raise KVLoomError if files that are written over are there, and no rows beside them that say whose they are, and
    if nothing can be written there."""
    there = [place / name for name in (*_WRITTEN, _ROWS) if os.path.lexists(place / name)]
    if there and not (place / _ROWS).is_file():
        raise KVLoomError(f"{there[0]} exists and is not from `kvloom eval`; name another folder with --out")
    for each in there:
        if not (each.is_file() and os.access(each, os.W_OK)):
            raise KVLoomError(f"{each} exists and cannot be written to; name another folder with --out")
    try:
        check_folder(place)
    except OSError as error:
        raise KVLoomError(f"{place} cannot be written to ({error.strerror}); name another folder with --out") from None


def _about(name: str, plan: Plan, *, plain: bool, dtype: str) -> dict[str, Any]:
    """Everything that rows depend on, besides their names and the weights."""
    return {
        "model": name if not Path(name).is_dir() else Path(name).resolve().name,
        "dtype": dtype, "prompts": "plain" if plain else "chat template", "seed": plan.seed,
        "text": f"Python {'.'.join(platform.python_version_tuple()[:2])}",
    }  # fmt: skip


def _words(given: str | None, default: Sequence[str]) -> list[str]:
    """Names between commas, each once."""
    if given is None:
        return list(default)
    return [word for word in dict.fromkeys(each.strip() for each in given.split(",")) if word]


def _evaluate(
    name: str, plan: Plan, wanted: list[Wanted], blends: list[str], place: Path, profile: Path | None, *, quick: bool,
    plain: bool, device: str, dtype: str, threads: int, as_json: bool,
) -> None:  # fmt: skip
    import torch

    from kvloom_connector_transformers import spec_of
    from kvloom_eval import blending, models, scoring
    from kvloom_eval.codecs import profile_of
    from kvloom_eval.prompts import Prompts, check_room
    from kvloom_eval.running import Run
    from kvloom_eval.scores.rows import Rows
    from kvloom_eval.text import calibration_windows

    torch.set_num_threads(threads)
    model, tokenizer = models.loaded(name, device=device, dtype=dtype)
    Prompts(tokenizer, plain=plain)
    for each in plan.contexts:
        check_room(model, each)
    scoring.check(model)
    try:
        spec = spec_of(model)
    except ValueError as error:
        raise KVLoomError(f"the model cannot be evaluated: {error}") from error
    if spec.kv_planes != 2:
        raise KVLoomError("the model cannot be evaluated: its K and V are of different sizes")
    about = {"weights": spec.revision.partition(", on ")[0], **_about(name, plan, plain=plain, dtype=dtype)}
    rows = Rows(place / _ROWS, about)
    blender: Blender | None = None
    if blends:
        blender = blending.Blender(model, tuple(blends))
    if any(each.needs_profile for each in wanted) and profile is None:
        profile = place / ("quick.kvprofile" if quick else "profile.kvprofile")
        length = min(_WINDOW, *plan.contexts)
        count = (_QUICK_TOKENS if quick else _CALIBRATION_TOKENS) // length
        windows = calibration_windows(tokenizer, length=length, most=count)
        with _progress("calibrating", len(windows)) as step:
            profile_of(model, windows, str(about["model"]), profile, step)
    codecs = {each.name: each.make(spec, profile) for each in wanted}
    digest = sha256(profile.read_bytes()).hexdigest()[:16] if profile is not None and profile.is_file() else ""
    profiles = {each.name: digest for each in wanted if each.needs_profile}
    run = Run(model, tokenizer, plan, rows, plain=plain, codecs=codecs, blender=blender, profiles=profiles)
    interrupted = False
    with _progress("evaluating", plan.steps) as step:
        try:
            run.run(step)
        except KeyboardInterrupt:
            interrupted = True
    _write(about, plan, rows, list(codecs), blender, profile, place, as_json=as_json)
    if interrupted:
        typer.echo(
            f"interrupted: the table is of what was measured; the same command goes on from {rows.file}", err=True
        )
        raise typer.Exit(130)


def _write(
    about: dict[str, Any], plan: Plan, rows: Any, codecs: list[str], blender: Blender | None, profile: Path | None,
    place: Path, *, as_json: bool,
) -> None:  # fmt: skip
    from kvloom_eval.scores import report, results

    names = [f"{task}/{context}" for task in plan.tasks for context in plan.contexts]
    coded = results.of_codecs(rows, names, codecs) if codecs else None
    blended = results.of_blending(rows, names, blender.names()) if blender is not None else None
    size = profile.stat().st_size if profile is not None else 0
    made = {
        "about": about, "profile_bytes": size,
        **({"codecs": results.as_json(coded)} if coded else {}),
        **({"blending": results.as_json(blended)} if blended else {}),
    }  # fmt: skip
    text = report.page(about, coded, blended, size)
    replace_file(place / "results.json", json.dumps(made, indent=1) + "\n")
    replace_file(place / "results.md", text)
    try:
        if coded:
            report.draw_codecs(coded, place / "codecs.png")
        if blended:
            report.draw_blending(blended, place / "blending.png")
    except ImportError:
        typer.echo("no chart: pip install matplotlib", err=True)
    typer.echo(json.dumps(made, indent=1) if as_json else text)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], Any]]:
    """A bar on a terminal; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    screen = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
