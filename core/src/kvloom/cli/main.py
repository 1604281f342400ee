"""The command itself: verbs of the core, then those of plugins; errors as one line and an exit status."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import kvloom
from kvloom.cli import config, doctor, output, plan, plugins, scrub, stat, trace, warm, why
from kvloom.errors import ConfigError, KVLoomError
from kvloom.plugins import Registry


def app() -> typer.Typer:
    """The command with every verb that is installed."""
    commands = typer.Typer(
        name="kvloom",
        help="Keep the KV cache of a language model, so that no prompt is prefilled twice.",
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
    )
    commands.callback()(_options)
    registry = Registry.discover()
    for verb in (plugins, doctor, config, plan, stat, why, trace, scrub, warm):
        verb.add(commands, registry)
    registry.add_commands(commands)
    return commands


def main() -> None:
    """Run it. Exit status: 1 for an error, 2 for one in the configuration or the command line."""
    try:
        app()()
    except KVLoomError as error:
        output.say(f"kvloom: {error}", stderr=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(kvloom.__version__)
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass
