"""kvloom for SGLang. Heavy modules are imported on first use, and SGLang only by `hicache`."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom import hookimpl


@hookimpl
def kvloom_gpu_connectors() -> Mapping[str, tuple[str, str]]:
    return {"sglang": (f"{__name__}.connector:SGLangConnector", f"{__name__}.settings:SGLangConfig")}
