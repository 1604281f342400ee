"""kvloom for Hugging Face transformers. Heavy modules are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvloom import hookimpl

if TYPE_CHECKING:
    import typer

    from .calls import check_call as check_call
    from .connector import TransformersConnector as TransformersConnector
    from .identity import signature as signature
    from .identity import spec_of as spec_of
    from .identity import transformers_model as transformers_model
    from .model import CachedModel as CachedModel
    from .model import Report as Report
    from .model import cached as cached
    from .restored import RestoredKV as RestoredKV
    from .restored import set_length as set_length

_HOME = {
    "CachedModel": "model",
    "Report": "model",
    "RestoredKV": "restored",
    "TransformersConnector": "connector",
    "cached": "model",
    "check_call": "calls",
    "set_length": "restored",
    "signature": "identity",
    "spec_of": "identity",
    "transformers_model": "identity",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


@hookimpl
def kvloom_gpu_connectors() -> Mapping[str, tuple[str, str]]:
    return {"transformers": (f"{__name__}.connector:TransformersConnector", "kvloom:Config")}


@hookimpl
def kvloom_add_commands(commands: typer.Typer) -> None:
    from .demo.command import demo

    commands.command("demo")(demo)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
