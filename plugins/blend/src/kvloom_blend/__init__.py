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
    "GivenTask": "runner.given",
    "Prefilled": "runner.runner",
    "Rotation": "rotation",
    "Rotations": "rotation",
    "Runner": "runner.runner",
    "SPTBlendRetriever": "seed",
    "SPTBlendRetrieverTask": "seed",
    "blended": "runner.model",
    "create_index": "indices",
    "executor_of": "quality",
    "gate": "rotation",
    "indices_to_mask": "indices",
    "kv_of": "runner.given",
    "mask_to_indices": "indices",
    "rotations_of": "rotation",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


@hookimpl
def kvloom_blend_executors() -> Mapping[str, tuple[str, str]]:
    executors, settings = f"{__name__}.executors", f"{__name__}.settings"
    return {
        "cacheblend": (f"{executors}:CacheBlendExecutor", f"{settings}:CacheBlendConfig"),
        "hybrid": (f"{executors}:HybridExecutor", f"{settings}:HybridConfig"),
        "question_attention": (f"{executors}:QuestionAttentionExecutor", f"{settings}:RatioConfig"),
        "epic": (f"{executors}:EpicExecutor", f"{settings}:EpicConfig"),
        "none": (f"{executors}:NoneExecutor", "kvloom:Config"),
        "full": (f"{executors}:FullExecutor", "kvloom:Config"),
    }


@hookimpl
def kvloom_blend_retrievers() -> Mapping[str, tuple[str, str]]:
    retrievers, settings = f"{__name__}.retrievers", f"{__name__}.settings"
    return {
        "separator": (f"{retrievers}:SeparatorRetriever", f"{settings}:SeparatorConfig"),
        "explicit": (f"{retrievers}:ExplicitRetriever", f"{settings}:PassageConfig"),
        "fixed": (f"{retrievers}:FixedRetriever", f"{settings}:FixedConfig"),
        "content": (f"{retrievers}:ContentRetriever", f"{settings}:ContentConfig"),
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
