"""kvloom's blending: reuses KV of known texts anywhere in a prompt.

Heavy modules are imported on first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvloom import hookimpl

if TYPE_CHECKING:
    import typer

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
def kvloom_blend_executors() -> Mapping[str, str]:
    return {
        "cacheblend": "kvloom_blend.executors:CacheBlendExecutor",
        "hybrid": "kvloom_blend.executors:HybridExecutor",
        "question_attention": "kvloom_blend.executors:QuestionAttentionExecutor",
        "epic": "kvloom_blend.executors:EpicExecutor",
        "none": "kvloom_blend.executors:NoneExecutor",
        "full": "kvloom_blend.executors:FullExecutor",
    }


@hookimpl
def kvloom_blend_retrievers() -> Mapping[str, str]:
    return {
        "separator": "kvloom_blend.retrievers:SeparatorRetriever",
        "explicit": "kvloom_blend.retrievers:ExplicitRetriever",
        "fixed": "kvloom_blend.retrievers:FixedRetriever",
        "content": "kvloom_blend.retrievers:ContentRetriever",
    }


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
