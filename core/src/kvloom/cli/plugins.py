"""`kvloom plugins`: the installed plugins, their states, and the types that each provides."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from kvloom.cli import output
from kvloom.plugins.plugin import PluginStatus
from kvloom.plugins.registry import Registry


def add(commands: typer.Typer, registry: Registry) -> None:
    @commands.command("plugins")
    def plugins(
        check: Annotated[bool, typer.Option("--check", help="Import every class, and work out every verb.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """List the installed plugins."""
        if check:
            registry.add_commands(typer.Typer())
        statuses = registry.statuses(imported=check)
        if as_json:
            print(json.dumps([asdict(status) for status in statuses], indent=2))
            return
        rows = [(status.name, status.state, _provides(status), _dist(status)) for status in statuses]
        output.print_table("", ("name", "state", "provides", "distribution"), rows)
        for status in statuses:
            if status.reason:  # too long for a column
                print(f"{status.name}: {status.reason}")


def _dist(status: PluginStatus) -> str:
    return f"{status.dist} {status.version}".strip() or "-"


def _provides(status: PluginStatus) -> str:
    return ", ".join(f"{kind} {type_}" for kind, type_ in status.provides) or "-"
