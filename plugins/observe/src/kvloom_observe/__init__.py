"""kvloom observers `prometheus`, `opentelemetry` and `live`, and the verbs `top` and `serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvloom import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def kvloom_observers() -> Mapping[str, str]:
    return {
        "prometheus": "kvloom_observe.prometheus.observer:PrometheusObserver",
        "opentelemetry": "kvloom_observe.otel:OpenTelemetryObserver",
        "live": "kvloom_observe.live.observer:LiveObserver",
    }


@hookimpl
def kvloom_add_commands(commands: typer.Typer) -> None:
    from . import commands as verbs

    verbs.add(commands)
