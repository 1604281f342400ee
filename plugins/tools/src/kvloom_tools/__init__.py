"""The verbs that look into stores, measure, verify and fill them; the observer `trace`; and `warm` for servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvloom import hookimpl

if TYPE_CHECKING:
    import typer

    from kvloom_tools.warming import Warmed as Warmed
    from kvloom_tools.warming import warm as warm

__all__ = ["Warmed", "warm"]


@hookimpl
def kvloom_observers() -> Mapping[str, str]:
    return {"trace": "kvloom_tools.trace_observer:TraceObserver"}


@hookimpl
def kvloom_add_commands(commands: typer.Typer) -> None:
    from kvloom_tools.verbs import config_schema, doctor, init, plan, scrub, stat, trace, warm, why

    for verb in (init, doctor, config_schema, plan, stat, why, trace, scrub, warm):
        verb.add(commands)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvloom_tools' has no attribute {name!r}")
    from kvloom_tools import warming

    return getattr(warming, name)
