"""`kvloom check` and `kvloom new`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

_KINDS = "backend, serializer, connector, tokens, retriever, executor or observer"


def add(commands: typer.Typer) -> None:
    """Add the verbs of the kit."""

    @commands.command("check")
    def check(
        kind: Annotated[str, typer.Argument(help=_KINDS)],
        type: Annotated[str, typer.Argument(help="The word in YAML.")],
        set: Annotated[
            list[str] | None,
            typer.Option("--set", help="A setting, KEY=VALUE as in YAML; {tmp} is a directory of each test's own."),
        ] = None,
        only: Annotated[list[str] | None, typer.Option("--only", help="Ids of requirements; default: all.")] = None,
        seconds: Annotated[
            float, typer.Option("--seconds", help="Time after which a requirement counts as hanging.")
        ] = 120.0,
        repeat: Annotated[int, typer.Option("--repeat", help="Number of runs of each, to find rare failures.")] = 1,
        thorough: Annotated[
            bool, typer.Option("--thorough", help="Test longer: more rounds of races, more blobs, more kills.")
        ] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Test an installed component against the requirements of its kind."""
        from kvloom_testkit.cli import report

        status = report.run(
            kind, type, set or [], only or [], seconds, as_json=as_json, repeat=repeat, thorough=thorough
        )
        raise typer.Exit(status)

    @commands.command("new")
    def new(
        kind: Annotated[str, typer.Argument(help=_KINDS)],
        name: Annotated[str, typer.Argument(help="The word in YAML.")],
        into: Annotated[Path, typer.Option("--into", help="Parent directory of the package.")] = Path(),
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Write the package of a new plugin."""
        from kvloom_testkit.cli import scaffold

        place = scaffold.create(kind, name, into)
        if as_json:
            print(json.dumps({"package": str(place)}))
            return
        print(f"{place} is a package; go on with\n\n    cd {place}\n    pip install -e '.[test]'\n    pytest\n")
