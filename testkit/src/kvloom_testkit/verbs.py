"""`kvloom check`."""

from __future__ import annotations

from typing import Annotated

import typer


def add(commands: typer.Typer) -> None:
    """Add the verbs of the kit."""

    @commands.command("check")
    def check(
        kind: Annotated[str, typer.Argument(help="backend, serializer, tokens, connector, observer, ...")],
        type: Annotated[str, typer.Argument(help="The word in YAML.")],
        set: Annotated[
            list[str] | None,
            typer.Option("--set", help="A setting, KEY=VALUE as in YAML; {tmp} is a directory of each test's own."),
        ] = None,
        only: Annotated[list[str] | None, typer.Option("--only", help="Ids of requirements; default: all.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Hold an installed component to the requirements of its kind."""
        from kvloom_testkit import report

        raise typer.Exit(report.run(kind, type, set or [], only or [], as_json=as_json))
