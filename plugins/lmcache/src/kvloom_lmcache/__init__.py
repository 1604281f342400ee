"""LMCache's configurations for kvloom: `kvloom config import`, and the same from Python.

Light on purpose: what is heavy is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvloom import hookimpl

if TYPE_CHECKING:
    import typer

    from kvloom_lmcache.conversion import import_config as import_config
    from kvloom_lmcache.conversion import import_environment as import_environment
    from kvloom_lmcache.draft import Imported as Imported
    from kvloom_lmcache.fields import Row as Row

_HOME = {"Imported": "draft", "Row": "fields", "import_config": "conversion", "import_environment": "conversion"}

__all__ = sorted(_HOME)  # noqa: PLE0605


@hookimpl
def kvloom_add_commands(commands: typer.Typer) -> None:
    from kvloom_lmcache.command import add

    add(commands)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
