"""kvloom for SGLang. Light on purpose: what is heavy is imported when it is asked for, and SGLang only by `hicache`."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom import hookimpl


@hookimpl
def kvloom_gpu_connectors() -> Mapping[str, str]:
    return {"sglang": "kvloom_connector_sglang.connector:SGLangConnector"}
