"""kvloom observers `prometheus`, `opentelemetry` and `live`, and the verbs `top` and `serve`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvloom import hookimpl

if TYPE_CHECKING:
    import typer

    from kvloom import Observer


@hookimpl
def kvloom_observers() -> Iterable[type[Observer]]:
    from .live.observer import LiveObserver
    from .otel import OpenTelemetryObserver
    from .prometheus.observer import PrometheusObserver

    return [PrometheusObserver, OpenTelemetryObserver, LiveObserver]


@hookimpl
def kvloom_add_commands(commands: typer.Typer) -> None:
    from . import commands as verbs

    verbs.add(commands)
