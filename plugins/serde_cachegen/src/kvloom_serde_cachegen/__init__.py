"""kvloom serializer `cachegen`: KV at a fifth of its size, or without loss at two thirds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvloom import hookimpl

if TYPE_CHECKING:
    import typer

    from kvloom import Serializer


@hookimpl
def kvloom_serializers() -> Iterable[type[Serializer]]:
    from kvloom_serde_cachegen import streams
    from kvloom_serde_cachegen.serializer import CacheGenSerializer

    streams.library()  # without it the plugin is broken, and says why
    return [CacheGenSerializer]


@hookimpl
def kvloom_add_commands(commands: typer.Typer) -> None:
    from kvloom_serde_cachegen.calibration.command import calibrate

    commands.command("calibrate")(calibrate)
