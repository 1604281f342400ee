"""`kvloom plugins`: what is installed, in which state, and what it provides or why it does not."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from kvloom.cli import output
from kvloom.plugins import PluginStatus, Registry


def add(commands: typer.Typer, registry: Registry) -> None:
    @commands.command("plugins")
    def plugins(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
        """List the installed plugins."""
        statuses = registry.statuses()
        if as_json:
            print(json.dumps([asdict(status) for status in statuses], indent=2))
            return
        rows = [(status.name, _dist(status), status.state, _says(status)) for status in statuses]
        output.print_table("", ("name", "distribution", "state", "provides"), rows)


def _dist(status: PluginStatus) -> str:
    return f"{status.dist} {status.version}".strip() or "-"


def _says(status: PluginStatus) -> str:
    provides = ", ".join(f"{kind} {type_}" for kind, type_ in status.provides)
    return "; ".join(filter(None, (status.reason, provides)))
