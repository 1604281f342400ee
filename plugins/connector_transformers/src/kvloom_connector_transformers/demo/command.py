"""The demo's verb: runs two fresh processes, one after the other, and shows their results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom import pip_install, replace_file

if TYPE_CHECKING:
    from rich.console import Console

    from .job import Job

_QUESTION = "\n\n\nIn short, this module"
_WRITTEN = ("kv", "laptop.yaml", "job.json", "result.json", "ttft.png", "store.log", "answer.log")
_CONFIG = """\
# Written by `kvloom demo`. Use it with your own model: cached(model, "laptop.yaml").
connector: transformers
tiers:
  - {{type: memory, capacity: 256MiB}}
  - {{type: disk, path: {path}, capacity: 8GiB{codec}}}
"""


def demo(
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="A transformers model (default: evals/pylm of the repository).")
    ] = "",
    document: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="The document to prefill (default: the source of Python's heapq).",
        ),
    ] = None,
    question: Annotated[str, typer.Option(metavar="TEXT", help="The text appended to the document.")] = _QUESTION,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of the document.")] = 3000,
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="Random weights instead: small, medium, or a number such as 150M.")
    ] = "",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for chart, configuration and KV.")] = Path(
        "demo-out"
    ),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the KV, and start from existing KV.")] = False,
    codec: Annotated[
        str, typer.Option(metavar="TYPE", help="The serializer of the disk tier, such as cachegen (default: raw).")
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Your own configuration (default: memory over disk, in DIR).",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prefill a document once, then answer from its stored KV in a second process."""
    from rich.console import Console

    from .job import Job, parameters

    if size and model:
        raise typer.BadParameter("pass either --size or --model")
    if codec and config:
        raise typer.BadParameter("pass either --codec or --config")
    try:
        count = parameters(size) if size else 0
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--size") from None
    if config is not None:
        from kvloom import EngineConfig, check_config

        check_config(EngineConfig.from_file(config), imported=False)  # before a model is loaded, in another process
    model, text, kv = "" if size else _model(model), document or _heapq(), out / "kv"
    _check_own(out)
    if not keep:
        shutil.rmtree(kv, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    if config is None:
        config = out / "laptop.yaml"
        serializer = f", serializer: {json.dumps(codec)}" if codec else ""
        replace_file(config, _CONFIG.format(path=json.dumps(str(kv.resolve())), codec=serializer))
    job = Job(
        model=model, parameters=count, document=str(text), tokens=tokens,
        question=question, config=str(config.resolve()), codec=codec,
    )  # fmt: skip
    job.save(out / "job.json")
    try:
        holds = _run(Console(markup=False, highlight=False, stderr=as_json), job, out, as_json=as_json)
    finally:
        if not keep:
            shutil.rmtree(kv, ignore_errors=True)
    if not holds:
        raise typer.Exit(1)


def _run(console: Console, job: Job, out: Path, *, as_json: bool) -> bool:
    from .report import checks, draw_chart, print_results

    stored = _process(console, "store", job, out)
    what = f"random Llama, {stored['parameters']:,} parameters" if job.parameters else job.model
    console.print(f"{what}; {Path(job.document).name}, {stored['document_tokens']:,} tokens", style="bold")
    console.print(
        f"process 1  prefilled in {stored['compute_seconds']:.2f} s, stored the KV of {stored['stored']:,} tokens "
        f"in {stored['store_seconds']:.2f} s: {stored['kv_bytes'] / 2**20:.1f} MiB, {_kept(stored)}"
        + (f" ({stored['already_stored']:,} were there)" if stored["already_stored"] else ""),
        soft_wrap=True,
    )
    if stored["note"]:
        console.print(f"           {stored['note']}", style="yellow")
    result = _process(console, "answer", job, out)
    console.print(f"process 2  started afresh, ready in {result['load_seconds']:.2f} s, answered from stored KV")
    if result["text"]:
        console.print()
        console.print(f"... {job.question.strip()}", end="", style="bold")
        console.print(result["text"].rstrip())
    elif job.parameters:
        console.print(
            "           (random weights say nothing worth reading; their prefill is real work)",
            style="dim",
            soft_wrap=True,
        )
    verdicts = checks(result)
    print_results(console, result, verdicts)
    made = {"stored": stored, "answered": result, "checks": [asdict(verdict) for verdict in verdicts]}
    replace_file(out / "result.json", json.dumps(made, indent=1))
    if as_json:
        print(json.dumps(made, indent=2))
    try:
        draw_chart(result, out / "ttft.png")
        console.print(f"chart: {out / 'ttft.png'}")
    except ImportError:
        console.print(f"no chart: {pip_install('kvloom-connector-transformers', 'demo')}", style="yellow")
    if not job.parameters:
        console.print(
            "A model this small prefills fast; --size medium shows the factor where prefill is real work.",
            soft_wrap=True,
        )
    return all(verdict.holds for verdict in verdicts)


def _process(console: Console, role: str, job: Job, out: Path) -> dict[str, Any]:
    """Run one of the two, and show its progress. typer.Exit if it fails."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    if not job.model or Path(job.model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    command = [sys.executable, "-P", "-m", "kvloom_connector_transformers.demo.worker", role, str(out / "job.json")]
    log = out / f"{role}.log"
    number = {"store": 1, "answer": 2}[role]
    with (
        log.open("w", encoding="utf-8") as errors,
        console.status(f"process {number}: starting") as status,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        assert process.stdout is not None
        said: dict[str, Any] = {}
        for line in process.stdout:
            said = json.loads(line)
            if "doing" in said:
                status.update(f"process {number}: {said['doing']}")
    if "result" in said:
        log.unlink()
        result: dict[str, Any] = said["result"]
        return result
    console.print(f"process {number} failed: {said.get('error') or log.read_text(encoding='utf-8')}", style="bold red")
    raise typer.Exit(1)


def _check_own(out: Path) -> None:
    """The demo removes `kv` and writes over its files, so only where an earlier one made them. Raises BadParameter."""
    from .job import Job

    if not (there := [name for name in _WRITTEN if os.path.lexists(out / name)]):
        return
    try:
        if not all((out / name).is_file() or (name == "kv" and (out / name).is_dir()) for name in there):
            raise ValueError("special files, or links that lead nowhere")
        Job.load(out / "job.json")
    except (OSError, ValueError, RecursionError, TypeError):
        text = f"{out / there[0]} exists and is not from a demo; name another directory"
        raise typer.BadParameter(text, param_hint="--out") from None


def _kept(stored: Mapping[str, Any]) -> str:
    kept = f"kept in {stored['kept_bytes'] / 2**20:.1f} MiB"
    factor = stored["kv_bytes"] / max(stored["kept_bytes"], 1)
    return f"{kept}, {factor:.1f} times smaller" if factor > 1.05 else kept


def _model(name: str) -> str:
    """The model asked for; a path as an absolute one. By default the trained model of the repository."""
    if name:
        return str(Path(name).resolve()) if Path(name).is_dir() else name
    here = Path.cwd()
    for folder in (here, *here.parents):
        weights = folder / "evals" / "pylm" / "weights"
        if (weights / "model.safetensors").is_file():
            return str(weights)
    raise typer.BadParameter(
        "evals/pylm is not in this folder nor above it; name a model, or pass --size small", param_hint="--model"
    )


def _heapq() -> Path:
    """A text with long prose that comes with Python."""
    import heapq

    if not Path(heapq.__file__).is_file():
        raise typer.BadParameter("this Python has no source of heapq; name a file", param_hint="--document")
    return Path(heapq.__file__)
