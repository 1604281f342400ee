"""vLLM's classes around kvloom's. Everything that imports vLLM is in here, and is made for one range of versions.

Light on purpose: every process of vLLM imports it, whether it uses kvloom or not.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KVLoomConnector as KVLoomConnector


def register() -> None:
    """Make `"kv_connector": "KVLoomConnector"` known without a module path. vLLM calls this, by its entry points."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # it was called before, in this process
        KVConnectorFactory.register_connector("KVLoomConnector", __name__, "KVLoomConnector")


def __getattr__(name: str) -> Any:
    if name != "KVLoomConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .connector import KVLoomConnector

    return KVLoomConnector
