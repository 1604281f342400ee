"""Blending inside vLLM, by a connector of its own: `kv_connector_module_path` is this module.

Light on purpose: every process of vLLM may import it. What imports vLLM is `connector` alone.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KVLoomBlendConnector as KVLoomBlendConnector
    from .extension import RememberExtension as RememberExtension

_HOME = {"KVLoomBlendConnector": "connector", "RememberExtension": "extension"}


def register() -> None:
    """Make `"kv_connector": "KVLoomBlendConnector"` known without a module path; for vLLM's entry points."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # it was called before, in this process
        KVConnectorFactory.register_connector("KVLoomBlendConnector", __name__, "KVLoomBlendConnector")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
