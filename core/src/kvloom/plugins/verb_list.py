"""The verbs of a command by name alone: working out every verb's options takes typer longer than all the rest."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator

import typer
from typer.main import get_command_name, solve_typer_info_defaults
from typer.models import CommandInfo, TyperInfo

from kvloom.errors import PluginError


def names(commands: typer.Typer) -> set[str]:
    """Names of verbs and of groups of verbs."""
    return {verb.name for verb in _outlines(commands) if verb.name}


def group(commands: typer.Typer, name: str) -> typer.Typer | None:
    """Return the group of verbs called `name`, an empty one for a verb that is only to be listed; None if none is."""
    if any(verb.name == name and verb.callback is _nothing for verb in commands.registered_commands):
        return typer.Typer()
    found = [info.typer_instance for info in commands.registered_groups if solve_typer_info_defaults(info).name == name]
    return found[0] if found else None


def merge(commands: typer.Typer, added: typer.Typer) -> None:
    """Add the verbs of `added`. A group whose name `commands` has for a group adds its verbs to that one.

    Raises PluginError if a verb is taken; nothing is added then.
    """
    rest = typer.Typer()
    rest.registered_commands = added.registered_commands
    pairs = [(commands, rest)]
    for info in added.registered_groups:
        name = solve_typer_info_defaults(info).name
        there = group(commands, name) if name else None
        if there is None or info.typer_instance is None:
            rest.registered_groups.append(info)
        else:
            pairs.append((there, info.typer_instance))
    for there, more in pairs:
        if both := names(there) & names(more):
            raise PluginError(f"the verb {min(both)!r} is taken")
    for there, more in pairs:
        there.registered_commands.extend(more.registered_commands)
        there.registered_groups.extend(more.registered_groups)


def outline(commands: typer.Typer, name: str, line: str) -> None:
    """Add a verb that is only to be listed."""
    commands.registered_commands.append(CommandInfo(name, callback=_nothing, help=line))


def only(commands: typer.Typer, name: str) -> typer.Typer | None:
    """The same command with one verb or group of verbs, which can be called; None if it has none of that name."""
    kept = copy.copy(commands)
    kept.registered_commands = [verb for verb in commands.registered_commands if _name(verb) == name]
    kept.registered_groups = [group for group in commands.registered_groups if name in _names_of_group(group)]
    return kept if kept.registered_commands or kept.registered_groups else None


def outlined(commands: typer.Typer) -> typer.Typer:
    """The same verbs, each with its name and the help that a list shows, and nothing to call."""
    kept = ("name", "help", "no_args_is_help", "context_settings")
    listed = typer.Typer(**{name: getattr(commands.info, name) for name in kept})
    listed.rich_markup_mode, listed._add_completion = commands.rich_markup_mode, commands._add_completion
    listed.registered_callback = commands.registered_callback
    listed.registered_commands = list(_outlines(commands))
    return listed


def _outlines(commands: typer.Typer) -> Iterator[CommandInfo]:
    for verb in commands.registered_commands:
        assert verb.callback is not None
        outline = copy.copy(verb)
        outline.name = _name(verb)
        outline.help = verb.help or inspect.getdoc(verb.callback)
        outline.callback = _nothing
        yield outline
    for group in commands.registered_groups:
        info = solve_typer_info_defaults(group)
        if info.name:
            yield CommandInfo(
                info.name, callback=_nothing, help=info.help, short_help=info.short_help, hidden=info.hidden
            )
        elif info.typer_instance is not None:  # its verbs stand beside the others
            yield from _outlines(info.typer_instance)


def _name(verb: CommandInfo) -> str:
    return verb.name or get_command_name(getattr(verb.callback, "__name__", ""))


def _names_of_group(group: TyperInfo) -> set[str]:
    name = solve_typer_info_defaults(group).name
    return {name} if name else names(group.typer_instance) if group.typer_instance else set()


def _nothing() -> None:
    pass
