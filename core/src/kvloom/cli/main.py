"""The command itself: verbs of the core, then those of plugins; errors as one line and an exit status."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
from typing import Annotated

import typer

import kvloom
from kvloom.errors import ConfigError, KVLoomError
from kvloom.plugins import verb_list
from kvloom.plugins.installing import pip_install
from kvloom.plugins.registry import Registry

VERBS = {"plugins": "List the installed plugins.", "config": "Check, show or import a configuration."}
"""The core's own verbs: each is a module of `kvloom.cli`, with its line in the list of verbs."""

ELSEWHERE = {
    **dict.fromkeys(["init", "doctor", "plan", "stat", "why", "trace", "scrub", "warm"], "kvloom-tools"),
    "top": "kvloom-observe",
    "serve": "kvloom-observe",
    "check": "kvloom-testkit",
    "new": "kvloom-testkit",
    "demo": "kvloom-connector-transformers",
    "calibrate": "kvloom-serde-cachegen",
    "blend": "kvloom-blend",
    "eval": "kvloom-eval",
    "config schema": "kvloom-tools",
    "config import": "kvloom-lmcache",
}
"""Verbs of other packages of kvloom, and the package of each."""


def app(verb: str | None = None) -> typer.Typer:
    """The command with every installed verb.

    verb: work out the options of this one only, and leave out the others; "" for a list, in which none can be called.
    """
    commands = typer.Typer(
        name="kvloom",
        help="Keep the KV cache of a language model, so that no prompt is prefilled twice.",
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        no_args_is_help=True,
    )
    commands.callback()(_options)
    registry = Registry.discover()
    for name, line in VERBS.items():
        if verb in (None, name):
            importlib.import_module(f"kvloom.cli.{name}").add(commands, registry)
        else:
            verb_list.outline(commands, name, line)
    registry.add_commands(commands, verb)
    for missing in sorted(ELSEWHERE):
        *above, name = missing.split()
        there = verb_list.group(commands, above[0]) if above else commands
        if there is not None and name not in verb_list.names(there):
            _add_missing(there, missing, registry)
    return commands if verb is None else verb_list.only(commands, verb) or verb_list.outlined(commands)


def _add_missing(commands: typer.Typer, verb: str, registry: Registry) -> None:
    """Add a verb that is not listed, and says what it needs."""
    dist = ELSEWHERE[verb]

    @commands.command(
        verb.split()[-1], hidden=True, add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )  # fmt: skip
    def missing() -> None:
        for status in registry.statuses():
            if status.dist == dist:
                raise ConfigError(f"kvloom {verb}", f"{dist} is installed and does not work: {status.reason}")
        raise ConfigError(f"kvloom {verb}", f"comes with {dist}: {pip_install(dist)}")


def main() -> None:
    """Run it.

    Exit status: 1 for an error, 2 for one in the configuration or the command line, 129 after SIGHUP, 143 after
    SIGTERM.
    """
    _open_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # which would leave a verb's files and processes behind
            signal.signal(number, _end)
    completing = "_KVLOOM_COMPLETE" in os.environ  # by the shell, for words that are not in sys.argv
    try:
        try:
            app(None if completing else next((word for word in sys.argv[1:] if not word.startswith("-")), ""))()
        finally:
            sys.stdout.flush()
    except KVLoomError as error:
        _say(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:  # while the verbs are being imported; from then on typer says so
        sys.exit(130)
    except OSError as error:  # such as a full disk behind stdout: what is left in its buffer has nowhere to go
        if not isinstance(error, BrokenPipeError):  # who read it has seen enough
            _say(f"{error.filename or 'output'}: {error.strerror or error}")
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _end(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a terminal that is closed may send it twice, and files are being removed
    sys.exit(128 + number)


def _open_streams() -> None:
    """Replace streams that the caller closed by /dev/null, and have all of them escape what they cannot encode.

    Python has None where one is closed, which cannot be flushed.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say(problem: str) -> None:
    from kvloom.cli import output

    output.say(f"kvloom: {problem}", stderr=True)


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
