"""vLLM's classes around kvloom's. Everything that imports vLLM is in here, and is made for one range of versions.

Light on purpose: every process of vLLM imports it, whether it uses kvloom or not.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KVLoomConnector as KVLoomConnector


def register() -> None:
    """Make `"kv_connector": "KVLoomConnector"` known without a module path, and have kvloom's settings checked early.

    vLLM calls this, by its entry points, in every process.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    check_when_looked_up(KVConnectorFactory)
    with contextlib.suppress(ValueError):  # it was called before, in this process
        KVConnectorFactory.register_connector("KVLoomConnector", __name__, "KVLoomConnector")


def check_when_looked_up(factory: Any) -> None:
    """Have vLLM's factory of connectors check the settings when it looks up the class that they are for.

    vLLM does so in its first process, before another one starts. A connector is made in the process of each rank, after
    the model has been loaded. Twice is fine.
    """
    lookup = factory.get_connector_class.__func__
    if hasattr(lookup, "__wrapped__"):
        return

    @functools.wraps(lookup)
    def get_connector_class(cls: Any, kv_transfer_config: Any) -> Any:
        found = lookup(cls, kv_transfer_config)
        _check(found, kv_transfer_config.kv_connector_extra_config)
        return found

    factory.get_connector_class = classmethod(get_connector_class)


def _check(connector: Any, extra: Any) -> None:
    """Raise RuntimeError for settings that cannot work. Of a ValueError pydantic would make a text of its own."""
    check = getattr(connector, "check_settings", None)
    if connector.__name__ == "OffloadingConnector" and "KVLoom" in str(extra):
        from ..configured import check_offloading as check
    if check is None:
        return
    from kvloom import ConfigError

    try:
        check(extra)
    except ConfigError as error:
        raise RuntimeError(f"{connector.__name__}: {error}") from None


def __getattr__(name: str) -> Any:
    if name != "KVLoomConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .connector import KVLoomConnector

    return KVLoomConnector
