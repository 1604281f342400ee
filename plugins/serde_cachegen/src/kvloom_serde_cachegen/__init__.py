"""kvloom serializer `cachegen`: KV at a fifth of its size, or without loss at two thirds."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvloom import hookimpl

if TYPE_CHECKING:
    import typer

_HOME = {
    "CacheGenConfig": "bins",
    "CacheGenSerializer": "serializer",
    "Profile": "profile",
    "calibrated": "calibration.calibrating",
}
__all__ = ["CacheGenConfig", "CacheGenSerializer", "Profile", "calibrated", "measuring"]


@hookimpl
def kvloom_serializers() -> Mapping[str, tuple[str, str]]:
    return {"cachegen": (f"{__name__}:CacheGenSerializer", f"{__name__}.settings:CodecConfig")}


@hookimpl
def kvloom_add_commands(commands: typer.Typer) -> None:
    from kvloom_serde_cachegen.calibration.command import calibrate

    commands.command("calibrate")(calibrate)


def __getattr__(name: str) -> Any:
    if name == "measuring":
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "CacheGenSerializer":
        from kvloom_serde_cachegen import streams

        streams.library()  # without it the plugin is broken, and says why
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
