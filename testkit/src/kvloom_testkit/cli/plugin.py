"""The plugin's entry module: imports nothing until the command line asks for verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvloom import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def kvloom_add_commands(commands: typer.Typer) -> None:
    from kvloom_testkit.cli import verbs

    verbs.add(commands)
