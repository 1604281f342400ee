"""kvloom's evaluation: scores of a model with exact KV, beside those with KV after a codec or after blending."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvloom import hookimpl

if TYPE_CHECKING:
    import typer

    from kvloom_eval.verdicts import judge as judge
    from kvloom_eval.verdicts import judge_blending as judge_blending
    from kvloom_eval.verdicts import steps as steps

_HOME = dict.fromkeys(("judge", "judge_blending", "steps"), "verdicts")
__all__ = sorted(_HOME)  # noqa: PLE0605


@hookimpl
def kvloom_add_commands(commands: typer.Typer) -> None:
    from kvloom_eval.command import evaluate

    commands.command("eval")(evaluate)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
