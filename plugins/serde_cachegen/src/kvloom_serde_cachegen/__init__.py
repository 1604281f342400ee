"""kvloom serializer `cachegen`: KV at a fifth of its size, or without loss at two thirds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvloom import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def kvloom_serializers() -> Mapping[str, tuple[str, str]]:
    return {"cachegen": (f"{__name__}:CacheGenSerializer", f"{__name__}.settings:CodecConfig")}


@hookimpl
def kvloom_add_commands(commands: typer.Typer) -> None:
    from kvloom_serde_cachegen.calibration.command import calibrate

    commands.command("calibrate")(calibrate)


def __getattr__(name: str) -> Any:
    if name != "CacheGenSerializer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvloom_serde_cachegen import streams
    from kvloom_serde_cachegen.serializer import CacheGenSerializer

    streams.library()  # without it the plugin is broken, and says why
    return CacheGenSerializer
