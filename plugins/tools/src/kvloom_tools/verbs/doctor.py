"""`kvloom doctor`: is everything here that is needed, does it fit together, and does each tier and observer work?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvloom import Registry, output

if TYPE_CHECKING:
    from kvloom_tools.checkup import Finding


def add(commands: typer.Typer) -> None:
    @commands.command("doctor", short_help="Find problems of the machine or a configuration.")
    def doctor(
        file: Annotated[
            Path | None,
            typer.Argument(metavar="[FILE]", help="A configuration: its tiers and observers are tried, too."),
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Look at what is installed, at the machine, and at a configuration's tiers; say what is wrong and what to do.

        A blob of 1 MiB is written to each tier, read and deleted. Exit status 1 if there is a problem.
        """
        from kvloom_tools.configuration import load

        resolved = None if file is None else load(file, imported=True)[1]
        found = []
        with output.progress("looking", None) as step:
            for finding in _findings(Registry.discover(), resolved):
                found.append(finding)
                step()
        problems = [finding for finding in found if finding.verdict == "problem"]
        if as_json:
            print(json.dumps([asdict(finding) for finding in found], indent=2))
        else:
            _print(found)
        raise typer.Exit(1 if problems else 0)


def _findings(registry: Registry, resolved: object) -> Iterator[Finding]:
    from kvloom_tools.checkup import installed, machine

    yield from installed.looked_at(registry)
    yield from machine.looked_at()
    if resolved is not None:
        from kvloom_tools.checkup import parts, tiers

        yield from parts.looked_at(resolved)  # type: ignore[arg-type]
        yield from tiers.looked_at(resolved)  # type: ignore[arg-type]


def _print(found: list[Finding]) -> None:
    topic = ""
    for one in found:
        if one.topic != topic:
            topic = one.topic
            output.say(topic)
        output.say(f"  {one.verdict:<8} {output.plain(one.subject)}: {output.plain(one.text)}")
    counts = {verdict: sum(one.verdict == verdict for one in found) for verdict in ("ok", "note", "problem")}
    output.say(f"{counts['ok']} ok, {counts['note']} notes, {counts['problem']} problems")
