"""`kvloom config schema`: the JSON schema of a configuration file, for editors."""

from __future__ import annotations

import json

import typer

from kvloom import Registry


def add(commands: typer.Typer) -> None:
    """Add `schema` to the verbs of `kvloom config`."""
    verbs = typer.Typer()
    commands.add_typer(verbs, name="config")

    @verbs.command("schema")
    def schema() -> None:
        """Print the JSON schema of a configuration file for the installed plugins, for editors."""
        from kvloom_tools.schema import json_schema

        print(json.dumps(json_schema(Registry.discover()), indent=2))
