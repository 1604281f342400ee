"""kvloom for SGLang. Heavy modules are imported on first use, and SGLang only by `hicache`."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom import hookimpl


@hookimpl
def kvloom_gpu_connectors() -> Mapping[str, str]:
    return {"sglang": "kvloom_connector_sglang.connector:SGLangConnector"}
