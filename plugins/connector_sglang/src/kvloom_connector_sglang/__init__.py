"""kvloom for SGLang. Heavy modules are imported on first use, and SGLang only by `hicache`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvloom import hookimpl

if TYPE_CHECKING:
    from kvloom import GPUConnector


@hookimpl
def kvloom_gpu_connectors() -> Iterable[type[GPUConnector]]:
    from kvloom_connector_sglang.connector import SGLangConnector

    return [SGLangConnector]
