"""kvloom's blending: reuses KV of known texts anywhere in a prompt.

Heavy modules are imported on first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvloom import hookimpl

if TYPE_CHECKING:
    import typer

    from kvloom import BlendExecutor, BlendRetriever

_HOME = {
    "BlendedModel": "runner.model",
    "CacheBlendImpl": "seed",
    "Prefilled": "runner.runner",
    "Rotation": "rotation",
    "Rotations": "rotation",
    "Runner": "runner.runner",
    "SPTBlendRetriever": "seed",
    "SPTBlendRetrieverTask": "seed",
    "blended": "runner.model",
    "create_index": "indices",
    "gate": "rotation",
    "indices_to_mask": "indices",
    "mask_to_indices": "indices",
    "rotations_of": "rotation",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


@hookimpl
def kvloom_blend_executors() -> Iterable[type[BlendExecutor]]:
    from .executors import EXECUTORS

    return EXECUTORS


@hookimpl
def kvloom_blend_retrievers() -> Iterable[type[BlendRetriever]]:
    from .retrievers import RETRIEVERS

    return RETRIEVERS


@hookimpl
def kvloom_add_commands(commands: typer.Typer) -> None:
    from .commands import add

    add(commands)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
