"""`kvloom trace record | replay`: the shapes of requests, and what another configuration would have made of them."""

from __future__ import annotations

import glob
import json
import os
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom import ConfigError, KVLoomError, output

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvloom_tools.replay import Trace
    from kvloom_tools.replay.sweep import Run

_VERB = re.compile(rb'"verb": ?"([a-z_]+)"')
"""In a recorded line."""
_MOST_LINE_BYTES = 1 << 20
"""Bytes of a line that are read at once: another program may write to a recording."""


def add(commands: typer.Typer) -> None:
    verbs = typer.Typer(
        help="Record the shapes of requests, and replay them against other configurations.",
        short_help="Record shapes of requests; replay them elsewhere.",
        no_args_is_help=True,
    )
    commands.add_typer(verbs, name="trace")

    @verbs.command("record")
    def record(
        file: Annotated[Path, typer.Argument(metavar="TRACE.jsonl", help="File to write; it must not exist.")],
        command: Annotated[
            list[str] | None,
            typer.Argument(metavar="-- COMMAND...", help="Command that opens kvloom's engines."),
        ] = None,
        max_bytes: Annotated[str, typer.Option(help="Stop recording before the file is longer.")] = "1GiB",
    ) -> None:
        """Run a command and record every request to the engines in it: lengths, hashes and times, no tokens.

        Exit status: the command's.
        """
        if not command:
            block = f"observers: [{{type: trace, path: {file}}}]"
            raise ConfigError("COMMAND", f"what is to be run? give it behind --, or put `{block}` in its configuration")
        raise typer.Exit(_record(Path(os.path.expanduser(file)).absolute(), command, max_bytes))

    @verbs.command("replay")
    def replay(
        trace: Annotated[
            Path, typer.Argument(metavar="TRACE", help="JSON lines, gzipped or not: recorded, or Mooncake's.")
        ],
        configs: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="YAML configurations to compare.")],
        spec: Annotated[
            str | None,
            typer.Option(metavar="SPEC", help="A KVSpec, a config.json or its directory, or a name in the hub cache."),
        ] = None,
        bytes_per_token: Annotated[
            float | None, typer.Option(min=0, help="Instead of --spec: bytes of one token's KV.")
        ] = None,
        capacity: Annotated[
            list[str] | None, typer.Option(metavar="TIER=A,B,C", help="Try these capacities of a tier. Repeatable.")
        ] = None,
        ratio: Annotated[
            list[str] | None,
            typer.Option(metavar="TIER=R", help="Size of a tier's blobs as a share of the KV (default: measured)."),
        ] = None,
        salt: Annotated[
            list[str] | None, typer.Option(metavar="NAME=N", help="The number in the trace of a salt with a quota.")
        ] = None,
        block_tokens: Annotated[
            int | None, typer.Option(min=1, max=1 << 20, help="Tokens of a block, for lines without it (default: 512).")
        ] = None,
        chart: Annotated[Path | None, typer.Option(help="Draw hit rates: a .png or .svg.")] = None,
        force: Annotated[bool, typer.Option("--force", help="Overwrite an existing chart.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Say what hits each configuration would have had, from which tier, and what it would have moved and evicted.

        No KV is needed or touched, and no store is opened.
        """
        from kvloom_tools.replay import Trace, sweep

        if chart is not None:
            sweep.check_chart(chart, force=force)
        options = sweep.Options(
            spec=spec, bytes_per_token=bytes_per_token, capacities=sweep.capacities(capacity or []),
            ratios=sweep.numbers(ratio or [], "--ratio"), tenants=sweep.integers(salt or [], "--salt"),
        )  # fmt: skip
        runs = sweep.runs(configs, options)
        smallest = min(run.replay.chunk_tokens for run in runs)
        source = Trace(trace, block_tokens=block_tokens, chunk_tokens=smallest)
        seconds = sweep.replay(source, runs)
        _check(source, runs)
        about = _about(source, runs[0], seconds)
        if as_json:
            print(json.dumps({"trace": about, "runs": [run.result() for run in runs]}, indent=2))
        else:
            _print(about, runs)
        if chart is not None:
            sweep.draw(runs, chart)


# -- recording ---------------------------------------------------------------------------------------------------------


def _record(file: Path, command: Sequence[str], max_bytes: str) -> int:
    """Run the command with the variable that has its engines record; its exit status."""
    from kvloom_tools.replay import sweep

    if file.exists():
        raise ConfigError(str(file), "exists already; choose another name, or remove it")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise ConfigError(str(file.parent), "no directory that can be written to; make it")
    most = sweep.byte_size(max_bytes, "--max-bytes")
    there = _beside(file)
    environment = {**os.environ, "KVLOOM_TRACE": str(file), "KVLOOM_TRACE_MAX_BYTES": max_bytes}
    try:
        child = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise ConfigError("COMMAND", f"{command[0]!r} cannot be run: {error.strerror}") from None
    passed_on = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *passed_on)}
    try:
        for number, handler in before.items():  # a terminal sends the first to both; the child decides
            if handler is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: child.send_signal(number) if number in passed_on else None)
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _say_recorded(file, there, most)
    return status if status >= 0 else 128 - status


def _beside(file: Path) -> list[Path]:
    """The files that further engines write if there is `file` already, as far as they are there."""
    return sorted(file.parent.glob(f"{glob.escape(file.stem)}.[0-9]*{glob.escape(file.suffix)}"))


def _say_recorded(file: Path, before: Collection[Path], max_bytes: int) -> None:
    """before: files beside it that were there before the recording. max_bytes: of each, no more is read."""
    found = [one for one in (file, *_beside(file)) if one not in before and one.is_file() and not one.is_symlink()]
    for one in found:
        try:
            verbs = _verbs(one, max_bytes)
        except OSError as error:  # the command's status says more
            output.say(f"{one}: cannot be read: {error.strerror}", stderr=True)
            continue
        counted = ", ".join(f"{count:,} {verb}" for verb, count in verbs.most_common())
        output.say(f"{one}: {verbs.total():,} calls ({counted or 'none'})", stderr=True)
    if not found:
        text = "nothing was recorded: no engine of kvloom had a request in what was run"
        output.say(f"kvloom: {text}", stderr=True)


def _verbs(file: Path, max_bytes: int) -> Counter[str]:
    """The number of calls of each verb. Raises OSError."""
    verbs: Counter[str] = Counter()
    with file.open("rb") as lines:
        while max_bytes > 0 and (line := lines.readline(min(_MOST_LINE_BYTES, max_bytes))):
            max_bytes -= len(line)
            if verb := _VERB.search(line):
                verbs[verb[1].decode()] += 1
    return verbs


# -- what came out -----------------------------------------------------------------------------------------------------


def _check(source: Trace, runs: Sequence[Run]) -> None:
    """Raises KVLoomError if nothing was left to replay."""
    for run in runs:
        if run.replay.sums.unfit and not run.replay.sums.requests:
            text = f"no block of the trace goes with chunks of {run.replay.chunk_tokens} tokens"
            raise ConfigError("chunk_tokens", f"{text}: one must be a multiple of the other")
    if source.lines == source.broken:
        first = "; ".join(f"line {number}: {why}" for number, why in source.first_broken[:1])
        raise KVLoomError(f"{source.path}: none of {source.lines} lines is a request{first and '; '}{first}")
    if not runs[0].replay.sums.requests:
        raise KVLoomError(f"{source.path}: no request asked for KV")


def _about(source: Trace, run: Run, seconds: float) -> dict[str, Any]:
    sums = run.replay.sums
    recorded = sum(sums.recorded_tokens.values())
    return {
        "path": str(source.path),
        "lines": source.lines,
        "broken": source.broken,
        "first_broken": [{"line": number, "why": why} for number, why in source.first_broken],
        "late": source.late,
        "requests": sums.requests,
        "tokens": sums.asked_tokens,
        "recorded_hit_rate": recorded / sums.asked_tokens if recorded else None,
        "recorded_tokens": dict(sums.recorded_tokens),
        "seconds": seconds,
    }


def _print(about: dict[str, Any], runs: Sequence[Run]) -> None:
    rows, tiers = [], []
    for run in runs:
        result = run.result()
        requests = max(1, result["requests"])
        rows.append(
            (run.label, _percent(result["hit_rate"]), _percent(result["chunk_hit_rate"]),
             _percent(result["whole"] / requests), _percent((result["whole"] + result["partly"]) / requests))
        )  # fmt: skip
        for tier in result["tiers"]:
            evicted = ", ".join(f"{count:,} {reason}" for reason, count in tier["evicted"].items()) or "0"
            tiers.append(
                (run.label, tier["tier"], output.size(tier["capacity"]), _percent(tier["hit_rate"]),
                 output.size(tier["read_bytes"]), output.size(tier["written_bytes"]), evicted,
                 output.size(tier["held_bytes"]))
            )  # fmt: skip
    requests, tokens = about["requests"], about["tokens"]
    calls = "" if about["lines"] == requests else f"{about['lines']:,} calls, "
    title = f"{about['path']}: {calls}{requests:,} requests that asked for {tokens:,} tokens"
    columns = ("configuration", "tokens hit", "chunks hit", "requests whole", "or partly")
    output.print_table(title, columns, rows, right=columns[1:])
    about_tiers = (
        "configuration",
        "tier",
        "capacity",
        "tokens hit",
        "read",
        "written",
        "chunks evicted",
        "held at last",
    )
    output.print_table("", about_tiers, tiers, right=about_tiers[2:])
    if about["recorded_hit_rate"] is not None:
        by_tier = ", ".join(f"{name} {_percent(n / tokens)}" for name, n in about["recorded_tokens"].items())
        output.say(f"the engine that was recorded had {_percent(about['recorded_hit_rate'])} ({by_tier})")
    for run in runs:
        for note in run.notes:
            output.say(f"{run.label}: {note}")
    if about["broken"]:
        share = f"{about['broken']:,} of {about['lines']:,} lines"
        output.say(f"{share} are no requests, and were passed over:", stderr=True)
        for one in about["first_broken"]:
            output.say(f"  line {one['line']}: {one['why']}", stderr=True)
        if about["broken"] > len(about["first_broken"]):
            output.say("  ...", stderr=True)
    if about["late"]:
        output.say(f"{about['late']:,} lines were too far out of order and were taken as they came", stderr=True)


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"
